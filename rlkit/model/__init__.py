from rlkit._elsewhere import elsewhere

__getattr__ = elsewhere(__name__)
