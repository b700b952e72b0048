"""fermata-differ: containerd's diff of a writable layer, made from the overlay's upper directory.

    mounts.py    which directory holds the difference between two sets of mounts, if one does
    messages.py  the messages of containerd's diff, content, lease and namespace services
    content.py   containerd's content store, from outside
    blob.py      a layer on its way into it, by gRPC or by file
    ingest.py    the file that containerd keeps an unfinished upload in
    service.py   the diff service
    server.py    the socket that containerd connects to, and the process around it
    http2.py     its frames, where they are looked at without gRPC
    decline.py   the answer to everything where Python has no gRPC
    check.py     whether the node's containerd has it switched on, for `fermata doctor`

docs/differ.md says how an operator switches it on, and what that changes.
"""
