"""Operations of rljax/kernels, measured one by one: a file each, and what they share."""
