"""Ask the server of server.py until it answers; prints the answer. Runs in the container's network namespace."""

import socket
import sys
import time

until = time.monotonic() + float(sys.argv[1])
while True:
    try:
        with socket.create_connection(("127.0.0.1", 8000), timeout=120) as connection:
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            data = b""
            while chunk := connection.recv(65536):
                data += chunk
        head, _, body = data.partition(b"\r\n\r\n")
        if b" 200 " in head.partition(b"\r\n")[0]:
            print(body.decode())
            break
    except OSError:
        if time.monotonic() > until:
            raise
    time.sleep(0.01)
