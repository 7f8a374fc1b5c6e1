"""dynspec: a batch-size switch for SGLang's EAGLE speculative decoding, and the proof that it is active."""

__version__ = "0.1.0"
