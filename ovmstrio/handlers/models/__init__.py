"""Models that handlers load by name: storages, versions, local cache and clients."""
