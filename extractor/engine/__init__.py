"""The model: loading, capture, proof, host copies, the worker process. The only package that imports SGLang."""
