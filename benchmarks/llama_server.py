"""llama.cpp's own server over a GGUF file, for `serve_http.py --servers llama`.

Run by the python of an environment with the package `xllamacpp` (and `gguf`, to convert).

    python benchmarks/llama_server.py --model smollm2-bf16.gguf --port 8080 --slots 32 --longest 384
    python benchmarks/llama_server.py --convert SOURCE.gguf --to BF16 --model smollm2-bf16.gguf
"""

import argparse
import os
import time


def serve(args: argparse.Namespace) -> None:
    """Serve a file until the process is ended."""
    import xllamacpp  # pyright: ignore[reportMissingImports] - of the environment of llama.cpp

    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.model_alias = {"llama"}
    params.port = args.port
    params.n_parallel = args.slots
    # Every slot has room for the longest request; prompts are read in passes of this size.
    params.n_ctx = args.slots * args.longest
    params.n_batch, params.n_ubatch = 2048, 512
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    params.verbosity = -1
    server = xllamacpp.Server(params)
    assert server.listening_address.endswith(f":{args.port}"), server.listening_address
    while True:
        time.sleep(1.0)


def convert(source: str, target: str, kind: str) -> None:
    """A copy of a GGUF file whose matrices are of one type; vectors are F32, as llama.cpp reads."""
    import gguf  # pyright: ignore[reportMissingImports]

    reader = gguf.GGUFReader(source)
    wanted = gguf.GGMLQuantizationType[kind]
    name = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(target, name)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = field.contents()
        if field.name == "general.file_type":
            value = int(gguf.LlamaFileType[f"MOSTLY_{kind}" if kind != "F32" else "ALL_F32"])
        inner = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, value, field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        plain = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        plain = plain.reshape(tuple(reversed(tensor.shape.tolist())))
        own = wanted if plain.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(plain, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Serve, or convert."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--slots", type=int, default=32, help="requests at once")
    parser.add_argument("--longest", type=int, default=384, help="tokens of a request")
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", "2")))
    parser.add_argument("--convert", metavar="GGUF", help="write --model from this file, and end")
    parser.add_argument("--to", choices=["BF16", "F16", "F32"], default="BF16")
    args = parser.parse_args()
    if args.convert:
        convert(args.convert, args.model, args.to)
    else:
        serve(args)


if __name__ == "__main__":
    main()
