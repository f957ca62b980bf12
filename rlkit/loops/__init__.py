from rlkit._platform import refuse_windows

refuse_windows(__name__)
