"""One file a run: `get_config()` changes what `common.base()` states."""
