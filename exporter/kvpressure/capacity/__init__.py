"""How much KV cache a model needs and a GPU has: pure arithmetic, no I/O but reading a model's ``config.json``.

``shapes`` what a model stores, ``models`` the ones known by name, ``weights`` their size, ``kvbytes`` bytes and blocks,
``load`` what is sent, ``plan`` memory audit and recommended limits, ``worksheet`` the guides' own approximations.


Formulas: vLLM's ``kv_cache_interface.py``, ``kv_cache_utils.py`` and ``gpu_worker.py`` (0.19 to 0.33).
"""
