"""Fresh Python processes, whose crash or lack of memory cannot touch this one."""
