from rlkit._elsewhere import elsewhere
from rlkit._platform import refuse_windows

refuse_windows(__name__)

__getattr__ = elsewhere(__name__)
