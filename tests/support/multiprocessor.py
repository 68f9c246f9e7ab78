"""What a multiprocessor of each GPU holds, by compute capability (90 for 9.0).

From the CUDA C++ Programming Guide, technical specifications per compute capability.
"""

SHARED_KIB = {80: 163, 90: 227, 100: 227, 120: 99}  # of a program, at most
SHARED_KIB_OF_SM = {80: 164, 90: 228, 100: 228, 120: 100}
RESERVED_SHARED = 1024  # bytes that each program takes beside its own
REGISTERS_OF_SM = 65536
THREADS_OF_SM = {80: 2048, 90: 2048, 100: 2048, 120: 1536}


def programs_of_sm(arch: int, registers: int, shared: int, num_warps: int) -> int:
    """How many programs run on a multiprocessor at a time; 0: not even one fits.

    Args:
        registers: of a thread.
        shared: bytes of a program.
    """
    if shared > SHARED_KIB[arch] << 10:
        return 0
    of_warp = -(-registers * 32 // 256) * 256  # dealt out by 256
    return min(
        REGISTERS_OF_SM // (of_warp * num_warps),
        (SHARED_KIB_OF_SM[arch] << 10) // (shared + RESERVED_SHARED),
        THREADS_OF_SM[arch] // (32 * num_warps),
    )
