"""A server with nginx before it, which speaks TLS with the clients.

    python behind_nginx.py PORT CERTIFICATE KEY COMMAND...

starts both and ends with the first of them; `{behind}` in the command stands for the server's own
port. nginx has two workers, as there are two cores, and keeps connections to the server open.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONF = """
{user}
worker_processes 2;
pid {folder}/pid;
daemon off;
error_log stderr;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    upstream behind {{ server 127.0.0.1:{behind}; keepalive 256; }}
    server {{
        listen 127.0.0.1:{port} ssl;
        ssl_certificate {cert};
        ssl_certificate_key {key};
        keepalive_requests 1000000000;
        client_max_body_size 0;
        location / {{
            proxy_pass http://behind;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
        }}
    }}
}}
"""


def main() -> None:
    port, cert, key, *command = sys.argv[1:]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        behind = probe.getsockname()[1]
    user = "user root;" if os.getuid() == 0 else ""  # its workers write large bodies into the folder
    with tempfile.TemporaryDirectory() as folder:
        conf = Path(folder, "nginx.conf")
        conf.write_text(CONF.format(user=user, folder=folder, behind=behind, port=port, cert=cert, key=key))
        both = [
            subprocess.Popen([part.replace("{behind}", str(behind)) for part in command]),
            subprocess.Popen(["nginx", "-c", str(conf)]),
        ]
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        try:
            while all(each.poll() is None for each in both):
                time.sleep(0.1)
        finally:
            for each in both:
                each.terminate()
            for each in both:
                each.wait()


if __name__ == "__main__":
    main()
