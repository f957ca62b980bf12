from rlkit._util.elsewhere import elsewhere

__getattr__ = elsewhere(__name__)
