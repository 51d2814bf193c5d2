"""Sizes that decide between two ways that are both right, with the measurements.

Times are those of one thread of an AMD EPYC, in single precision, with PyTorch 2.13. A
convolution is named by channels and output positions, its kernel has 3x3 entries. On
another machine other sizes are best.
"""

# Chunks

# Temporary buffers have at most this many elements: they are recycled by the allocator,
# and stay in the processor's caches. Squares of 10 columns, 64 to 96 channels, 12x12
# positions, 32 samples: 78 to 94 ms for 2^18 to 2^20 elements, 99 for 2^22, 144 for
# 2^24.
CHUNK_ELEMENTS = 2**19

# The same for inputs whose features are multiplied with each other, where each chunk
# adds to a large result. 96 channels, 8x8 positions, 128 samples: 98 ms; 112 for 2^20
# elements, 138 for 2^18.
UNFOLDED_ELEMENTS = 2**22

# Single products of a column with this many elements are formed some samples at a time:
# each is used, and added to their sum, while it is in the caches. Individual gradients
# and their sum, 192 channels, 8x8 positions, 16 samples: 16 ms instead of 42; no
# difference up to 2^16.
LARGE_PRODUCT = 2**16

# The memory for them and for unfolded inputs, up to so many elements, is recycled.
# Squares and sum, 192 channels, 16x16 positions, 16 samples: 41 ms, 52 for 2^22, 46 for
# single samples.
STEP_ELEMENTS = 2**21

# Sums

# On a CPU, norms and the dot products of few rows are added up number by number, and
# lose digits: of 10^7 numbers 5e-4, of 10^8 a percent. Pieces of this length lose 1e-7,
# and take as long (1.37 ms instead of 1.28 for 10^7); dot products of 8 rows of 10^7
# take 36 ms instead of 86.
PIECE_ELEMENTS = 2**14

# oneDNN adds up the dot products of few rows in blocks of its own, with an error below
# 2e-6 up to this length. 8 rows of 331,776 numbers: 0.95 ms, in pieces 1.83.
BLOCKED_ELEMENTS = 3 * 2**17

# From this size on, squares are added up slice by slice, in one pass over memory. 32
# slices of 2^13 elements: 110 us, at once 79; of 2^14 140 and 145; of 2^17 840 and
# 1,924.
SLICE_ELEMENTS = 2**14

# So many rows are added up by one product with a vector, which adds number by number: 8
# rows of 331,776 numbers take 184 us instead of 416. The bound is for their digits.
SUMMED_ROWS = 64

# From so many numbers on. Below, a sum takes fewer steps (8 rows of 16,384: 20 us, by a
# product 52; of 44,032: 44 and 89, on an AMD EPYC).
SUMMED_ELEMENTS = 2**20

# Formulas

# From this number of multiplications on that Gram matrices take for each element of an
# individual gradient, to form these, and to add them up on the way, costs less than
# Gram matrices and the sum by autograd; without and with a BLAS that uses all of the
# processor. Norms and sum, 192 channels, 8 samples: for 25 positions (3.6) 5.0 ms and
# 4.1, for 36 (7.5) 5.8 and 7.0, for 49 (14) 6.4 and 10.6. Linear, 64 positions, 4
# samples (Zen 4): 768 to 2304 features (7.1) 23 and 12, to 768 (11) 4.9 and 4.9; 8
# samples, 128 to 512 (40) 1.0 and 1.5. Less where inputs are unfolded, without such a
# BLAS: linear, 64 positions, 4 samples (Zen 4), 512 to 2048 features (10) 8.3 and 6.8;
# 8 samples, 256 to 1024 (20) 4.1 and 3.9, to 256 (32) 0.94 and 1.05. Norms for a GPT-2
# of 512 features: 1.19 and 1.09 gradients instead of 1.30 and 1.21 with 9; no
# difference for 128, 256 and 768. By whether they are, and whether there is one.
GRAM_MULTIPLICATIONS = {
    **{(True, False): 9, (False, False): 20},
    **{(True, True): 58, (False, True): 58},
}

# Up to so many positions per output channel, a fast matrix product with the unfolded
# input beats a convolution, which reorders each product. Squares and sum, 192 channels,
# 8 samples: for 1.0 16.6 ms and 19.6, for 1.5 22.2 and 25.6, for 3.0 45.5 and 44.0.
FEW_POSITIONS = 1.5

# Matrix products

# oneDNN takes longer to choose the code to run, the more so if that is not in the
# caches: there must be this many multiplications to make up for it, in all and in each
# product. (512 x 128) (128 x 784), with AVX-512: 505 us, by the BLAS 1,095; KFRA on an
# MLP 2.67 gradients instead of 2.95 with single products from 2^23 on. A small product
# does not make up for being formed, and used, alone: 8 of (128 x 64) (64 x 384) in 790
# us, at once by the BLAS 540.
MIN_MULTIPLICATIONS = 2**23
MIN_PER_PRODUCT = 2**22

# Nor is it made for products with vectors. (2 x 2048) (2048 x 2048): 1.5 ms, by the
# BLAS 0.8; with 8 rows 2.1 and 1.6.
MIN_SIZE = 8

# A symmetric product is formed in this many strips, if it has this many rows, and this
# many numbers are added up for each element. Kronecker factors of a convolutional
# network (3C3D, 32 samples): KFAC 2.1 gradients instead of 2.3.
STRIPS, MIN_ROWS, MIN_SUMMANDS = 6, 256, 256

# Strips have a multiple of so many rows. 576 features, 4608 summands: 8.5 ms, four even
# strips 9.1; 864 and 1152: 4.9 and 5.3.
LANES = 16

# Memory

# From so many bytes on, the system is asked for huge pages, since page faults bound the
# first touch of memory. 64 MiB: 8 ms instead of 37; what is smaller than 32 MiB the C
# library recycles, and the question takes 7 us.
HUGE_BYTES = 2**22
