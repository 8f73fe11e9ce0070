"""What torch and others said when memory ran out, in the words of each release.

Taken from public bug reports; the figures are theirs.
"""

TORCH_1_2 = (
    "RuntimeError: CUDA out of memory. Tried to allocate 3.86 GiB (GPU 0; 10.92 GiB total "
    "capacity; 5.17 GiB already allocated; 1.52 GiB free; 3.72 GiB cached)"
)
TORCH_1_8 = (
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 4; 31.75 GiB total "
    "capacity; 30.29 GiB already allocated; 3.75 MiB free; 30.40 GiB reserved in total by PyTorch)"
)
TORCH_1_12_LIMITED = (
    "RuntimeError: CUDA out of memory. Tried to allocate 5.59 GiB (GPU 0; 11.17 GiB total "
    "capacity; 0 bytes already allocated; 10.91 GiB free; 5.58 GiB allowed; 0 bytes reserved in "
    "total by PyTorch) If reserved memory is >> allocated memory try setting max_split_size_mb to "
    "avoid fragmentation.  See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)
TORCH_2_1 = (
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacty "
    "of 8.00 GiB of which 0 bytes is free. Of the allocated memory 14.51 GiB is allocated by "
    "PyTorch, and 15.90 MiB is reserved by PyTorch but unallocated. If reserved but unallocated "
    "memory is large try setting max_split_size_mb to avoid fragmentation."
)
_ADVICE = (
    " If reserved but unallocated memory is large try setting {}=expandable_segments:True to avoid "
    "fragmentation.  See documentation for Memory Management  "
    "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
CUDA_ADVICE = _ADVICE.format("PYTORCH_CUDA_ALLOC_CONF")
FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 170.00 MiB. GPU 0 has a total "
    "capacity of 31.37 GiB of which 30.19 MiB is free. Including non-PyTorch memory, this process "
    "has 31.33 GiB memory in use. Of the allocated memory 30.81 GiB is allocated by PyTorch, and "
    "33.90 MiB is reserved by PyTorch but unallocated." + _ADVICE.format("PYTORCH_ALLOC_CONF")
)
FRAGMENTED = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 764.00 MiB. GPU 0 has a total "
    "capacity of 47.37 GiB of which 442.88 MiB is free. Including non-PyTorch memory, this process "
    "has 46.92 GiB memory in use. Of the allocated memory 42.40 GiB is allocated by PyTorch, and "
    "3.24 GiB is reserved by PyTorch but unallocated." + CUDA_ADVICE
)
TWO_PROCESSES = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.95 GiB. GPU 0 has a total "
    "capacity of 14.57 GiB of which 1.58 GiB is free. Process 2493055 has 12.02 GiB memory in use. "
    "Including non-PyTorch memory, this process has 966.00 MiB memory in use. Of the allocated "
    "memory 734.07 MiB is allocated by PyTorch, and 33.93 MiB is reserved by PyTorch but "
    "unallocated." + CUDA_ADVICE
)
CONTAINER = (
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 256.00 MiB. GPU 0 has a total "
    "capacity of 47.53 GiB of which 16.88 MiB is free. Process 3652628 has 47.51 GiB memory in "
    "use. Of the allocated memory 47.14 GiB is allocated by PyTorch, and 57.79 MiB is reserved by "
    "PyTorch but unallocated." + CUDA_ADVICE
)
LIMITED = (
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 996.00 MiB. GPU 0 has a total "
    "capacity of 44.43 GiB of which 9.06 GiB is free. Process 2102129 has 17.54 GiB memory in use. "
    "Including non-PyTorch memory, this process has 17.81 GiB memory in use. 17.69 GiB allowed; Of "
    "the allocated memory 17.44 GiB is allocated by PyTorch, and 59.88 MiB is reserved by PyTorch "
    "but unallocated." + CUDA_ADVICE
)
WSL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.74 GiB. GPU 0 has a total "
    "capacity of 23.99 GiB of which 5.05 GiB is free. Including non-PyTorch memory, this process "
    "has 17179869184.00 GiB memory in use. Of the allocated memory 17.60 GiB is allocated by "
    "PyTorch, and 34.80 MiB is reserved by PyTorch but unallocated." + CUDA_ADVICE
)
GRAPHS = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 40.00 MiB. GPU 0 has a total "
    "capacity of 23.50 GiB of which 31.19 MiB is free. Process 1620724 has 23.46 GiB memory in "
    "use. Of the allocated memory 21.18 GiB is allocated by PyTorch, with 1.78 GiB allocated in "
    "private pools (e.g., CUDA Graphs), and 856.57 MiB is reserved by PyTorch but unallocated."
)
TOO_LARGE = (
    "CUDA out of memory. Tried to allocate 130206.04 GiB. GPU 0 has a total capacity of 23.56 GiB "
    "of which 16.57 GiB is free. Including non-PyTorch memory, this process has 6.97 GiB memory in "
    "use. Of the allocated memory 5.45 GiB is allocated by PyTorch, and 1.17 GiB is reserved by "
    "PyTorch but unallocated." + CUDA_ADVICE
)
MALLOC_ASYNC = """torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. \
(out of memory)
Currently allocated     : 4.86 GiB
Requested               : 10.12 GiB
Device limit            : 24.00 GiB
Free (according to CUDA): 0 bytes
PyTorch limit (set by user-supplied memory fraction)
                        : 17179869184.00 GiB
This error means you ran out of memory on your GPU."""
ROCM = (
    "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 978.00 MiB. GPU 0 has a total "
    "capacity of 15.98 GiB of which 630.00 MiB is free. Of the allocated memory 0 bytes is "
    "allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated."
    + _ADVICE.format("PYTORCH_HIP_ALLOC_CONF")
)
CPU = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't "
    "allocate memory: you tried to allocate 2359296 bytes. Error code 12 (Cannot allocate memory)"
)
CPU_WINDOWS = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:117] data. DefaultCPUAllocator: not enough "
    "memory: you tried to allocate 911360 bytes."
)
CUBLAS = "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
DRIVER = "RuntimeError: CUDA error: out of memory"
CUBLAS_HANDLE = (
    "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
)
CUDNN_HANDLE = "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"
NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled cuda error "
    "(run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to "
    "CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
)
BITSANDBYTES = "Error out of memory at line 380 in file /mmfs1/bitsandbytes/csrc/ops.cu"
TRITON = (
    "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 180224, "
    "Hardware limit: 101376. Reducing block sizes or `num_stages` may help."
)
MPS = (
    "RuntimeError: MPS backend out of memory (MPS allocated: 5.05 GB, other allocations: 1.50 GB, "
    "max allowed: 6.80 GB). Tried to allocate 512.00 MB on private pool. Use "
    "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory allocations (may cause "
    "system failure)."
)
WORKER_KILLED = "RuntimeError: DataLoader worker (pid 31247) is killed by signal: Killed. "
RANK_KILLED = (
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\ntrain.py FAILED\n"
    "  exitcode  : -9 (pid: 2207)\n  error_file: <N/A>\n"
    "  traceback : Signal 9 (SIGKILL) received by PID 2207"
)
SLURM = "slurmstepd: error: Detected 1 oom_kill event in StepId=1234.0. Some of your processes may"
BUS_ERROR = (
    "RuntimeError: DataLoader worker (pid 12) is killed by signal: Bus error. It is possible that "
    "dataloader's workers are out of shared memory. Please try to raise your shared memory limit."
)
SHM_FULL = (
    "RuntimeError: unable to write to file </torch_1234_5678_0>: No space left on device (28)"
)
NUMPY = (
    "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.45 GiB for an array with "
    "shape (1000000000,) and data type float64"
)
