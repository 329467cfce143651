"""llama.cpp's own server over a GGUF file, in a process: an OpenAI-compatible endpoint.

It computes in fp32 throughout, so that its log-probabilities can be compared with others.
"""

import argparse
import time

import xllamacpp  # pyright: ignore[reportMissingImports] - of the tests that need it


def main() -> None:
    """Serve a file until the process is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    given = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = given.model
    params.port = given.port
    params.n_parallel = 4
    params.n_ctx = 4 * 64
    params.warmup = False
    params.verbosity = -1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    assert server.listening_address.endswith(f":{given.port}")
    while True:
        time.sleep(1.0)


if __name__ == "__main__":
    main()
