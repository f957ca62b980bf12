from rlkit._moved import elsewhere
from rlkit._platform import refuse_windows

refuse_windows(__name__)

__getattr__ = elsewhere(__name__)
