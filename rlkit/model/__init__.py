from rlkit._moved import elsewhere

__getattr__ = elsewhere(__name__)
