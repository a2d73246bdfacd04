"""Forward only: outputs of a batch, of a stream of batches, and tokens made one after another."""
