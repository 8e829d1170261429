"""Values in messages: pickles, tensors, exceptions, shared memory."""
