"""what KV events show: which blocks are evicted and stored again, and what more KV memory would keep"""
