"""Differential fuzzing: small random training programs, plain and with settings.

Each silent fault of three reviews had one form: *some state is written in some way at some place,
and read at another*. A seed gives a small model and one to three habits of that form
(``grammar``), which become a script (``script``, ``program.txt``). It is trained plain, twice, and
with settings (``settings``, ``fit``). What the user computes, weights, buffers, optimizer state,
metrics, random numbers and what is left in modules must be equal, as far as the table of the fit
promises (``compare``); an error must be a refusal, not of a preset, and in the first step.

- ``make fuzz COUNT=1000 SEED=5``: a line per disagreement, and how often each setting was on.
- ``python -m tests.fuzz --shrink SEED --settings NAME``: the smallest program that still disagrees.
- A new habit is a dataclass with ``choices`` and ``add_to``, and its weight in ``grammar``. It
  changes what all seeds mean, so that seeds are good for one commit.
- A class of programs that can neither be right nor be found is a sentence in the documentation and
  an entry of ``exclusions``; one that an open issue will mend is an expected failure there.
"""
