"""On-disk layouts that trainers read, one module each. They are made from committed shards."""
