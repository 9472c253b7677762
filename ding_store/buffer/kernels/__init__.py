"""The loops that numba compiles, where there is one."""
