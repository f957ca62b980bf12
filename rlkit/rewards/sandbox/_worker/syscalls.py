"""System call numbers, and a seccomp filter that denies the calls no solution needs: defence in depth.

Numbers: https://github.com/torvalds/linux, arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h
"""

from __future__ import annotations

import errno
import platform
import struct

# name: (x86_64, aarch64); None: the machine has no such call
_NUMBERS: dict[str, tuple[int | None, int | None]] = {
    # the network, other programs
    "socket": (41, 198), "execve": (59, 221), "execveat": (322, 281),
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "pidfd_getfd": (438, 438), "kcmp": (312, 272),
    # file systems
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "fanotify_init": (300, 262), "swapon": (167, 224), "swapoff": (168, 225),
    "acct": (163, 89),
    # namespaces, keys
    "unshare": (272, 97), "setns": (308, 268), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    # large parts of the kernel
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    # memory that no limit covers, messages
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180), "vmsplice": (278, 75), "move_pages": (279, 239),
    "mbind": (237, 235),
    # the machine
    "personality": (135, 92), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142), "syslog": (103, 116),
    "modify_ldt": (154, None), "iopl": (172, None), "ioperm": (173, None),
}  # fmt: skip
_column = 1 if platform.machine() == "aarch64" else 0
CLONE = (56, 220)[_column]
PIVOT_ROOT = _NUMBERS["pivot_root"][_column]
CAPSET = (126, 91)[_column]
_FORKS = ((57, 58), ())[_column]  # fork, vfork
_CLONE3 = 435
_ARCH = (0xC000003E, 0xC00000B7)[_column]
_THREAD, _NEW_NAMESPACES = 0x10000, 0x7E020080
_PRCTL, _SET_PDEATHSIG = (157, 167)[_column], 1

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000


def _deny_filter(*, forks: bool) -> bytes:
    """A seccomp program: denied calls fail with EPERM, `clone3` with ENOSYS (libc then takes `clone`).

    Without `forks`, `clone` may only start threads; with them, processes too, but never new namespaces. The signal that
    a program gets when its server dies cannot be changed.
    """
    denied = [pair[_column] for pair in _NUMBERS.values()]
    denied += [] if forks else _FORKS
    listed = sorted(number for number in denied if number is not None)
    deny, no_system_call = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    program = [
        (_LOAD, 0, 0, 4),  # the architecture
        (_EQUAL, 1, 0, _ARCH),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # the number
        (_AT_LEAST, 0, 1, 0x40000000),  # the x32 table
        (_RETURN, 0, 0, deny),
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, no_system_call),
        (_EQUAL, 0, 4, _PRCTL),
        (_LOAD, 0, 0, 16),  # its option, of which the kernel reads 32 bits
        (_EQUAL, 0, 1, _SET_PDEATHSIG),
        (_RETURN, 0, 0, deny),
        (_RETURN, 0, 0, _ALLOW),
        (_EQUAL, 0, 5, CLONE),
        (_LOAD, 0, 0, 16),  # its flags
        (_ANY_BIT, 2, 0, _NEW_NAMESPACES),
        *([(_RETURN, 0, 0, _ALLOW)] if forks else [(_ANY_BIT, 0, 1, _THREAD)]),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, deny),
    ]
    for position, number in enumerate(listed):
        program.append((_EQUAL, len(listed) - position, 0, number))
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, deny)]
    return b"".join(struct.pack("<HBBI", *step) for step in program)


DENY = {forks: _deny_filter(forks=forks) for forks in (False, True)}
"""The filters, by whether the program may fork."""
