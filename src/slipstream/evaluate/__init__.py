"""5. Judge and hand over: export of the weights, generated text."""
