"""Tables computed from the committed H200 campaign; :mod:`simulator.measure.findings` says what each one shows."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

DATA = Path(__file__).parents[2] / "hardware_profiles" / "measurements" / "h200_sxm"
SMS = 132
HBM_READ_GB_PER_S = 4542.0  # best streaming read of micro_run1.csv (hbm_read, 4 GiB); FINDINGS "hbm" recomputes it
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp8": 1}


def read(name: str, folder: Path = DATA) -> pd.DataFrame:
    """A CSV of the campaign without its ``#`` header."""
    return pd.read_csv(folder / name, comment="#")


def timed() -> pd.DataFrame:
    """Mean of the two settled timed runs, indexed by case."""
    first, second = (read(f"timed_run{run}.csv").set_index("case_id") for run in (1, 2))
    second = second.loc[first.index]
    out = first.copy()
    for column in ("measured_time_us", "measured_sm_clock_mhz"):
        out[column] = (first[column] + second[column]) / 2
    return out


def counted() -> pd.DataFrame:
    """First counter run, indexed by case."""
    return read("counters_run1.csv").set_index("case_id")


def input_bytes(rows: pd.DataFrame) -> pd.Series:
    """Bytes of Q, K and V, each once."""
    tokens = rows.seqlen_q * rows.heads + 2 * rows.seqlen_k * rows.kv_heads
    return rows.batch * tokens * rows.head_dim * rows.dtype.map(ELEMENT_BYTES)


def output_bytes(rows: pd.DataFrame) -> pd.Series:
    """Bytes of O in 16 bits."""
    return rows.batch * rows.seqlen_q * rows.heads * rows.head_dim * 2


def forward_flop(rows: pd.DataFrame) -> pd.Series:
    """4·B·H·d per unmasked pair; causal counted as half plus the diagonal (equal lengths)."""
    pairs = rows.seqlen_q * rows.seqlen_k
    causal = rows.causal.astype(bool)
    offset = rows.seqlen_k - rows.seqlen_q
    masked = rows.seqlen_q * (rows.seqlen_q + 1) / 2 + rows.seqlen_q * offset
    return 4 * rows.batch * rows.heads * rows.head_dim * pairs.where(~causal, masked)


def table_noise() -> pd.DataFrame:
    """Difference between runs, in per cent: settled runs, runs on a busy GPU, counters."""
    rows = []
    for label, names, column in (
        ("time, settled", ("timed_run1.csv", "timed_run2.csv"), "measured_time_us"),
        ("time, busy GPU", ("timed_busy_run1.csv", "timed_busy_run2.csv"), "measured_time_us"),
        ("cycles, settled", ("timed_run1.csv", "timed_run2.csv"), "cycles"),
        ("HBM read > 30 MB", ("counters_run1.csv", "counters_run2.csv"), "measured_hbm_read_bytes"),
        ("HBM written > 30 MB", ("counters_run1.csv", "counters_run2.csv"), "measured_hbm_write_bytes"),
        ("SM reads > 30 MB", ("counters_run1.csv", "counters_run2.csv"), "measured_l2_read_bytes"),
    ):
        first, second = (read(name).set_index("case_id") for name in names)
        second = second.loc[first.index]
        if column == "cycles":
            a, b = (run.measured_time_us * run.measured_sm_clock_mhz for run in (first, second))
        else:
            a, b = first[column], second[column]
        keep = a > 30e6 if "30 MB" in label else a > 0
        off = (a[keep] / b[keep] - 1).abs() * 100
        rows.append([label, int(keep.sum()), off.median(), off.mean(), off.quantile(0.9), off.max()])
        if label == "time, settled":
            long = keep & (a > 20)
            off = off[long]
            rows.append(
                ["time, settled, > 20 us", int(long.sum()), off.median(), off.mean(), off.quantile(0.9), off.max()]
            )
    return pd.DataFrame(rows, columns=["what", "rows", "median %", "mean %", "p90 %", "max %"]).round(2)


def table_known_traffic() -> pd.DataFrame:
    """SM traffic of kernels whose traffic is known: S of QK^T, S and P of softmax, O and LSE of FA3."""
    launches = read("launches_run1.csv")
    launches["l2_read"] = launches["lts__t_sectors_srcunit_tex_op_read.sum"] * 32
    launches["l2_write"] = launches["lts__t_sectors_srcunit_tex_op_write.sum"] * 32
    rows = []
    for case, index, what, scores in (
        ("standard_model-check_4096", 0, "QK^T: S written", 4 * 16 * 4096**2 * 2),
        ("standard_model-check_4096", 1, "softmax: S read", 4 * 16 * 4096**2 * 2),
        ("standard_model-check_4096", 1, "softmax: P written", 4 * 16 * 4096**2 * 2),
    ):
        launch = launches[(launches.case_id == case) & (launches.launch_index == index)].iloc[0]
        got = launch.l2_read if "read" in what else launch.l2_write
        rows.append([case, what, scores / 1e6, got / 1e6, got / scores])
    cases = counted()
    for case in ("fa3_model-check_4096", "fa3_long-b1-h16-q32768-d128", "fa3_model-gpt2_medium_unmasked"):
        row = cases.loc[[case]]
        want = float(output_bytes(row).iloc[0] + 4 * (row.batch * row.heads * row.seqlen_q).iloc[0])
        got = float(row.measured_l2_write_bytes.iloc[0])
        rows.append([case, "FA3: O and LSE written", want / 1e6, got / 1e6, got / want])
    return pd.DataFrame(rows, columns=["case", "traffic", "known MB", "counted MB", "ratio"]).round(4)


def table_roofline() -> pd.DataFrame:
    """Time over the larger of tensor time (wgmma peak at the counted clock) and HBM time (inputs + output once)."""
    rows = timed()
    rows = rows[(rows["pass"] == "fwd") & (rows.l2_state == "cold") & rows.window.isna() & (rows.timing != "eager")]
    rows = rows[~rows.family.str.contains("_cta|_wave|_rows|_splits")]  # launches that are meant to leave SMs idle
    peak = rows.dtype.map({"bf16": 4096, "fp16": 4096, "fp8": 8192}) * SMS * rows.measured_sm_clock_mhz
    tensor_us = forward_flop(rows) / peak
    hbm_us = (input_bytes(rows) + output_bytes(rows)) / HBM_READ_GB_PER_S / 1e3
    ratio = rows.measured_time_us / pd.concat([tensor_us, hbm_us], axis=1).max(axis=1)
    size = pd.cut(rows.measured_time_us, [0, 20, 100, 1000, 1e7], labels=["<20 us", "20-100 us", "0.1-1 ms", ">1 ms"])
    out = ratio.groupby([rows.algorithm, rows.implementation, size], observed=True)
    return out.agg(["size", "min", "median", "max"]).round(2).reset_index()


def table_clock() -> pd.DataFrame:
    """SM clock counted during single launches, by kernel and head dim (rows of 0.1 to 5 ms), and in long ones."""
    rows = timed()
    kind = pd.cut(rows.measured_time_us, [0, 50, 5000, 1e7], labels=["<50 us", "0.05-5 ms", ">5 ms"])
    clocks = rows.groupby(["implementation", "pass", "head_dim", kind], observed=True).measured_sm_clock_mhz
    out = pd.DataFrame(clocks.agg(["size", "min", "median", "max"]).round(0).astype(int).reset_index())
    return out[out["size"] >= 3]


def table_clock_under_load() -> pd.DataFrame:
    """SM clock after 0, 0.02, 0.2 and 1 s of one load, both runs."""
    first, second = read("micro_run1.csv"), read("micro_run2.csv")
    first["run 2"] = second.set_index("row_id").measured_value.reindex(first.row_id).to_numpy()
    rows = first[first.benchmark.isin(["clock", "power"])]
    return rows[["parameters", "unit", "measured_value", "run 2"]].round(0)


def table_capacity() -> pd.DataFrame:
    """HBM reads over the inputs' bytes where K and V of what is live together exceed L2."""
    rows = counted()
    rows = rows[rows.family.str.contains("long")]
    clock = rows.measured_kernel_time_us / 1e3
    return pd.DataFrame(
        {
            "case": rows.index,
            "inputs GB": (input_bytes(rows) / 1e9).to_numpy().round(3),
            "HBM read GB": (rows.measured_hbm_read_bytes / 1e9).to_numpy().round(3),
            "over inputs": (rows.measured_hbm_read_bytes / input_bytes(rows)).to_numpy().round(2),
            "SM read GB": (rows.measured_l2_read_bytes / 1e9).to_numpy().round(1),
            "ms": clock.to_numpy().round(2),
        }
    )


def table_survivors() -> pd.DataFrame:
    """Input bytes that did not come from HBM although a 512 MB buffer had been read before: what the flush leaves in
    L2.
    """
    rows = counted()
    rows = rows[(rows["pass"] == "fwd") & rows.algorithm.isin(["fa2", "fa3"]) & rows.window.isna()]
    missing = (input_bytes(rows) - rows.measured_hbm_read_bytes) / 1e6
    size = pd.cut(
        input_bytes(rows) / 1e6, [0, 10, 30, 60, 150, 1e6], labels=["<10", "10-30", "30-60", "60-150", ">150"]
    )
    groups = missing.groupby([rows.algorithm, size.rename("inputs MB")], observed=True)
    found = groups.agg(rows="size", median_missing_MB="median", max_missing_MB="max").round(2).reset_index()
    out = pd.DataFrame(found)
    share = (missing * 1e6 / input_bytes(rows)).groupby([rows.algorithm, size.rename("inputs MB")], observed=True).max()
    out["max share"] = share.round(3).to_numpy()
    return out


def table_spills() -> pd.DataFrame:
    """Bytes that SMs write to L2 over O's by number of keys, beside local-memory stores (128 bytes a warp) at 4096
    keys.
    """
    rows = counted()
    rows = rows[rows.family.str.match(r"fa[23]_length_d") & rows.seqlen_q.isin([512, 2048, 8192])]
    rows = rows.assign(over=rows.measured_l2_write_bytes / output_bytes(rows))
    out = rows.pivot_table(index=["algorithm", "head_dim", "causal"], columns="seqlen_q", values="over").round(2)
    mix = read("mix_launches_run1.csv").groupby("case_id")["smsp__inst_executed_op_local_st.sum"].sum() * 128
    cases = timed()
    cases = cases[cases.family.str.match(r"fa[23]_length_d") & (cases.seqlen_q == 4096)]
    cases = cases.assign(local=mix.reindex(cases.index) / output_bytes(cases))
    out["local stores / O at 4096"] = (
        cases.set_index(["algorithm", "head_dim", "causal"]).local.reindex(out.index).round(2)
    )
    out.columns = [f"SM writes / O at {name}" if isinstance(name, int) else name for name in out.columns]
    return out.reset_index()


def table_waves() -> pd.DataFrame:
    """CTAs around full waves, 8192 keys: FA3 fits one CTA an SM, FA2 one or two, FA1 two or three."""
    rows = timed()
    rows = rows[rows.family.isin(["fa3_wave", "fa2_wave", "fa1_wave"]) & rows.seqlen_k.isin([8192, 1024])]
    rows = rows[(rows.seqlen_k == 8192) | (rows.algorithm == "fa1")]
    out = rows.pivot_table(index=["algorithm", "head_dim"], columns="heads", values="measured_time_us").round(0)
    return out.reset_index()


def table_first_flash() -> pd.DataFrame:
    """FA1's schedule beside FA2 and unfused attention on the same problems: time and HBM bytes."""
    rows, bytes_ = timed(), counted()
    shapes = ["batch", "heads", "seqlen_q", "head_dim", "causal"]
    picked = rows[rows.family.isin([f"{a}_length_d{d}" for a in ("fa1", "fa2", "standard") for d in (64, 128)])].copy()
    hbm = (bytes_.measured_hbm_read_bytes + bytes_.measured_hbm_write_bytes) / 1e9
    picked["GB"] = hbm.reindex(picked.index)
    picked = picked[picked.seqlen_q.between(512, 8192)]
    out = picked.pivot_table(index=shapes, columns="algorithm", values=["measured_time_us", "GB"])
    pairs = out.columns.to_frame().itertuples(index=False)
    out.columns = [f"{algorithm} {'us' if 'time' in str(what) else what}" for what, algorithm in pairs]
    return out.round(2).reset_index().sort_values(["head_dim", "causal", "seqlen_q"])


def table_softmax() -> pd.DataFrame:
    """Unfused attention by kernel: share of time, and softmax's bytes over its time, by row length."""
    spans, cases = read("spans_run1.csv"), timed()
    spans = spans[spans.case_id.str.startswith("standard_length_d128")]
    rows = []
    for case, kernels in spans.groupby("case_id"):
        shape = cases.loc[case]
        scores = shape.batch * shape.heads * shape.seqlen_q * shape.seqlen_k * 2
        is_softmax = kernels.kernel_name.str.contains("softmax|SoftMax")
        is_mask = kernels.kernel_name.str.contains("elementwise")
        name = kernels.kernel_name[is_softmax].iloc[0]
        rows.append(
            {
                "keys": shape.seqlen_k,
                "causal": bool(shape.causal),
                "total us": kernels.measured_span_us.iloc[0],
                "QK+PV us": kernels.measured_kernel_us[~is_softmax & ~is_mask].sum(),
                "mask us": kernels.measured_kernel_us[is_mask].sum(),
                "softmax us": kernels.measured_kernel_us[is_softmax].sum(),
                "softmax GB/s": 2 * scores / kernels.measured_kernel_us[is_softmax].sum() / 1e3,
                "softmax kernel": "warp" if "softmax_warp" in name else "register" if "Reg" in name else "shared/other",
            }
        )
    return pd.DataFrame(rows).sort_values(["causal", "keys"]).round(0)


def table_splits() -> pd.DataFrame:
    """FA3 decode by number of splits (32 query heads on 8 KV heads, d = 128), in us."""
    rows = timed()
    rows = rows[rows.family == "decode_fa3_splits"]
    out = rows.pivot_table(index=["batch", "seqlen_k"], columns="num_splits", values="measured_time_us").round(1)
    grid = timed()
    automatic = grid[grid.family == "decode_fa3_grid"].set_index(["batch", "seqlen_k"]).measured_time_us
    out["auto"] = automatic.reindex(out.index).round(1)
    return out.reset_index()


def table_pages() -> pd.DataFrame:
    """FA3 decode on pages, and the same with a contiguous cache whose length the device knows."""
    rows = timed()
    rows = rows[rows.family.str.startswith("decode_fa3_paged") | (rows.family == "decode_fa3_capacity")]
    rows = rows.assign(page=rows.page_size.fillna(0).astype(int).astype(object).replace(0, "contiguous"))
    out = rows[["batch", "seqlen_q", "seqlen_k", "kv_capacity", "page", "measured_time_us"]].copy()
    size = rows.batch * rows.kv_heads * rows.seqlen_k * 2 * rows.head_dim * 2
    out["KV GB/s"] = (size / rows.measured_time_us / 1e3).round(0)
    return out.round(1)


def table_pipes() -> pd.DataFrame:
    """Elements a clock and SM of instruction mixes: exponentials hide under FMA, and the other way round."""
    rows = read("micro_run1.csv")
    rows = rows[rows.benchmark.str.startswith(("pipe_", "mma_", "wgmma", "shared", "barrier"))]
    return rows[["benchmark", "parameters", "measured_value", "unit", "measured_sm_clock_mhz"]].round(1)


def table_hbm() -> pd.DataFrame:
    """HBM bandwidth by direction, size and walking order."""
    rows = read("micro_run1.csv")
    return rows[rows.benchmark.str.startswith("hbm_")][
        ["benchmark", "parameters", "measured_value", "measured_best"]
    ].round(0)


def table_l2() -> pd.DataFrame:
    """L2: bandwidth by footprint (the knee), and latency by footprint."""
    first, second = read("micro_run1.csv"), read("micro_run2.csv").set_index("row_id")
    rows = first[first.benchmark.isin(["l2_read", "l2_copy", "l2_atomic_add_fp32", "latency_chase"])].copy()
    rows["run 2"] = second.measured_value.reindex(rows.row_id).to_numpy()
    return rows[["benchmark", "parameters", "measured_value", "run 2", "unit"]].round(0)


def table_streams() -> pd.DataFrame:
    """GB/s from HBM by CTAs (one an SM) and bytes that each keeps in flight."""
    rows = read("micro_run1.csv")
    rows = rows[rows.benchmark.str.startswith("cta_stream") & rows.parameters.str.contains("source=hbm")].copy()
    rows["ctas"] = rows.parameters.str.extract(r"ctas=(\d+)").astype(int)
    rows["KiB in flight"] = rows.parameters.str.extract(r"in_flight_bytes=(\d+)").astype(int) // 1024
    rows["engine"] = rows.benchmark.str.replace("cta_stream_", "")
    out = rows.pivot_table(index=["engine", "KiB in flight"], columns="ctas", values="measured_value", aggfunc="max")
    return out.round(0).reset_index()


def table_launch() -> pd.DataFrame:
    """Graph time minus the kernels' own span, by number of kernels; and the launch microbenchmarks."""
    rows, spans = timed(), read("spans_run1.csv").groupby("case_id")
    rows = rows[(rows.timing == "graph") & (rows.l2_state == "cold") & (rows.measured_time_us < 60)]
    over = rows.measured_time_us - spans.measured_span_us.first().reindex(rows.index)
    kernels = spans.size().reindex(rows.index)
    return over.groupby(kernels.rename("kernels")).agg(["size", "median", "min", "max"]).round(2).reset_index()


def table_backward() -> pd.DataFrame:
    """Backward: HBM bytes over the compulsory sum (Q, K, V, O, dO read; dQ, dK, dV written), and time."""
    rows = counted()
    rows = rows[(rows["pass"] == "bwd") & (rows.implementation != "torch_eager")]
    query = rows.batch * rows.seqlen_q * rows.heads * rows.head_dim * 2
    key = rows.batch * rows.seqlen_k * rows.kv_heads * rows.head_dim * 2
    least = 4 * query + 4 * key
    moved = rows.measured_hbm_read_bytes + rows.measured_hbm_write_bytes
    out = pd.DataFrame({"over": moved / least, "us": timed().measured_time_us.reindex(rows.index)})
    out["TFLOP/s"] = 2.5 * forward_flop(rows) / out.us / 1e6
    keep = rows.family.str.contains("model|gqa|deterministic") | (rows.seqlen_q == 8192)
    out = out[keep].round(2)
    out.insert(0, "compulsory MB", (least[keep] / 1e6).round(0))
    return out.reset_index()
