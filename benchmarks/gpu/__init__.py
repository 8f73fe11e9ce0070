"""Each technique alone and all together on one GPU, after the tests that need one."""
