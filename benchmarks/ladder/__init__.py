"""One workload, each technique alone and all together, beside Hugging Face's Trainer."""
