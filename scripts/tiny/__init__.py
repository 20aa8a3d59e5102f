"""Parts of ``train_tiny.py``: corpus, chat samples, tokenizer, optimiser, evaluation."""
