from rlkit._util.elsewhere import elsewhere
from rlkit._util.platform import refuse_windows

refuse_windows(__name__)

__getattr__ = elsewhere(__name__)
