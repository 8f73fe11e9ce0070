"""The planner's constants, each with its source.

Those without another source were tuned by hand against tests/planning/test_search.py and
`benchmarks.plan --budgets`, which compare plans with all that there are: with these the best one is
found in few predictions.
"""

# --- Which of two plans is better -----------------------------------------------------------------

EQUALLY_FAST = 0.01
"""Plans whose time differs by less, as a share, are judged by exactness: estimated ratios were
within 14 % of measured ones on a CPU (benchmarks/results/step_time_cpu.md)."""
CLOSE = 0.005
"""Of the time of the unchanged step: no faster plan is looked for that gains less."""
FASTER, SMALLER, MUCH_FASTER = 0.99, 0.999, 0.8
"""Of the time and the bytes without a setting: it helps below the first two; where all settings
together are faster than the third, plans with fewer are not recorded apart."""

# --- What estimates of bytes allow for ------------------------------------------------------------

RESERVE, LARGE_RESERVE = 0.02, 0.06
"""Of an estimate: what the allocator adds to a step that was not predicted whole is known roughly;
the second for a setting that is merely nicer to have."""
SLACK = 0.004
"""Of the room: added to estimates each time that a plan was predicted to need slightly too much."""
NEAR = 0.1
"""By so much, as a share, estimates of a device's memory may be off (tests/planning/test_host_plans
allows 7 % where activations are copied)."""

# --- How long to search ---------------------------------------------------------------------------

MAX_VERIFIED = 8
"""Whole predictions in one search, at most."""
FOR_PLANS, FOR_LAST_PLANS = 0.5, 0.25
"""Of the time that is allowed: left for predictions of whole plans; the second where settings are
recorded that are not advised."""
SHARE_OF_SINGLE_SETTINGS = 2 / 3
"""Of the time for an out-of-memory report: for single settings; the rest is for a plan."""
MOST_NESTED = 12
"""Numbers of blocks of one kind that are compared in deep models, beside those of another kind."""

# --- What is shown --------------------------------------------------------------------------------

STEP, MOST_STEPS = 0.04, 24
"""Of a smaller plan less than this share is not worth a line, and so many lines are enough."""
MENTIONED = 0.02
"""Of the bytes on the device: smaller categories are not named."""

# --- How long kernels take ------------------------------------------------------------------------

PRODUCT, ATTENTION, MEMORY = 0.65, 0.45, 0.8
"""Of the rates in data sheets: what published training runs reach on one GPU (torchtune, torchtitan
and RoundPipe on RTX 4090, A100 and H100: 32 to 66 % of all FLOP/s). Between plans for the same GPU
ratios hold better than seconds."""
LEVEL = 0.5, 2.0
"""The least and the most time of a step, as factors of its estimate: published runs reach 32 to 66
% of a GPU, and estimates of the models in `benchmarks.plan` 19 to 62 %."""
HOST_MEMORY = 5e10
"""Bytes/s of a desktop's memory with two channels. Servers reach several times as much."""
LAUNCH_S = 4e-5
"""Of an operator in eager mode, forward or backward, with autograd and the Python code around it:
42 microseconds for RoBERTa 84M and GPT-2 XL on the virtual cores beside an H200
(benchmarks/results/gpu_nvidia_h200); desktops have faster cores."""
RECOMPUTED = 3
"""An operator that is recomputed takes so many times as long to launch, as checkpointing looks at
each of its tensors: 3 to 6 in the same runs."""
TYPICAL_GPU = "A100-40GB"
"""Whose rates are used for a GPU of which only a size is known: it has the compute capability that
is assumed for kernels then."""
