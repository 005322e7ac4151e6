"""Answer photos with calibrated probabilities: python examples/photos_service.py STATE, then POST a photo to it."""

import io
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


def serve(state: Path, port: int = 8000) -> ThreadingHTTPServer:
    about = json.loads((state / "classes.json").read_text())
    network = onnxruntime.InferenceSession(state / "photos.onnx", providers=["CPUExecutionProvider"])

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                body = self.rfile.read(min(int(self.headers.get("Content-Length", 0)), 20_000_000))
                photo = ImageOps.fit(
                    Image.open(io.BytesIO(body)).convert("RGB"), (about["side"],) * 2, Image.Resampling.BICUBIC
                )
            except (OSError, ValueError, Image.DecompressionBombError):
                return self.send_error(400, "a photo is expected")
            pixels = np.asarray(photo, dtype=np.float32).transpose(2, 0, 1)[None]
            (probabilities,) = network.run(None, {"photos": pixels})
            text = json.dumps(dict(zip(about["names"], probabilities[0].tolist(), strict=True))).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(text)

    return ThreadingHTTPServer(("127.0.0.1", port), Answer)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 8000).serve_forever()
