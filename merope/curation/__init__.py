"""Which clips to keep: clusters of motion, suppression of near copies, retrieval of views by overlap."""
