//! Compares every format on every level, at odd sizes, with dequantised weights multiplied in f64; and all levels, row counts
//! and thread counts with each other, bit for bit.

use testing::needs;
use types::DType;

use super::super::matrix::Format;
use super::super::{Buffer, CpuBackend, CpuOptions, DecodeMath, KvType, Level, PrefillMath};
use super::Chunks;
use crate::{Activation, Backend, Gated, MatrixSource, Rows, quant};

/// Deterministic pseudorandom numbers between -1 and 1.
fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// Weights in `dtype`: floats rounded, quantised formats as random blocks with small, finite scales.
fn weights(dtype: DType, rows: usize, cols: usize, seed: u64) -> Vec<u8> {
    let values = noise(rows * cols, seed);
    match dtype {
        DType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DType::F16 => values.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect(),
        DType::BF16 => values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect(),
        _ => {
            let blocks = rows * cols / dtype.block_elements();
            let mut bytes: Vec<u8> =
                noise(blocks * dtype.block_bytes(), seed).iter().map(|v| (v * 128.0).floor() as i8 as u8).collect();
            let halves: &[usize] = match dtype {
                DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => &[0, 2],
                DType::Q2_K => &[80, 82],
                DType::Q3_K => &[108],
                DType::Q6_K => &[208],
                _ => &[0],
            };
            for (i, block) in bytes.chunks_exact_mut(dtype.block_bytes()).enumerate() {
                for &at in halves {
                    let scale = half::f16::from_f32(0.001 * (1.0 + (i % 7) as f32));
                    block[at..at + 2].copy_from_slice(&scale.to_le_bytes());
                }
            }
            bytes
        }
    }
}

fn source(dtype: DType, rows: usize, cols: usize, bytes: &[u8]) -> MatrixSource<'_> {
    let row_stride = dtype.row_bytes(cols).unwrap();
    MatrixSource { dtype, rows, cols, row_stride, bytes, keep: dtype }
}

/// Every arithmetic of decode rows with one of prefill rows.
const MATHS: [(DecodeMath, PrefillMath); 4] = [
    (DecodeMath::Exact, PrefillMath::Bf16),
    (DecodeMath::Exact, PrefillMath::Exact),
    (DecodeMath::Int8, PrefillMath::Exact),
    (DecodeMath::Int8, PrefillMath::Int8),
];

fn backend(level: Level, threads: usize) -> CpuBackend {
    backend_with(level, threads, MATHS[0])
}

fn backend_with(level: Level, threads: usize, (decode, prompt): (DecodeMath, PrefillMath)) -> CpuBackend {
    CpuBackend::new(CpuOptions { threads, level, kv: KvType::F32, decode, prompt }).unwrap()
}

fn buffer(backend: &CpuBackend, rows: usize, cols: usize, values: &[f32]) -> Buffer {
    let mut buffer = backend.buffer(rows, cols).unwrap();
    backend.write(&mut buffer, values).unwrap();
    buffer
}

fn run(backend: &CpuBackend, parts: &[MatrixSource<'_>], x: &[f32], bias: Option<&Vec<f32>>) -> Vec<f32> {
    run_rows(backend, parts, Rows::decode(x.len() / parts[0].cols), x, bias)
}

fn run_rows(
    backend: &CpuBackend,
    parts: &[MatrixSource<'_>],
    by_role: Rows,
    x: &[f32],
    bias: Option<&Vec<f32>>,
) -> Vec<f32> {
    let (cols, out_cols) = (parts[0].cols, parts.iter().map(|part| part.rows).sum());
    let rows = by_role.all();
    let matrix = backend.matrix(parts).unwrap();
    let x = buffer(backend, rows, cols, x);
    let mut out = backend.buffer(rows, out_cols).unwrap();
    backend.linear(by_role, &mut out, &x, &matrix, bias);
    let mut values = vec![0f32; rows * out_cols];
    backend.read(&out, 0..rows, &mut values).unwrap();
    values
}

/// `W x` in f64 from the dequantised weights, and the Euclidean norm of every row of weights.
fn exact(dtype: DType, rows: usize, cols: usize, bytes: &[u8], x: &[f32]) -> (Vec<f64>, Vec<f64>) {
    let mut w = vec![0f32; rows * cols];
    for (row, w) in w.chunks_exact_mut(cols).enumerate() {
        let len = dtype.row_bytes(cols).unwrap();
        quant::dequantise(dtype, &bytes[row * len..(row + 1) * len], w);
    }
    let dot = |x: &[f32], w: &[f32]| x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum::<f64>();
    let lengths = w.chunks_exact(cols).map(|w| dot(w, w).sqrt()).collect();
    (
        x.chunks_exact(cols).flat_map(|x| w.chunks_exact(cols).map(move |w| dot(x, w)).collect::<Vec<_>>()).collect(),
        lengths,
    )
}

/// (outputs, inputs): panels processed one, two, four and eight at a time; odd numbers of blocks.
fn sizes(dtype: DType) -> Vec<(usize, usize)> {
    let block = dtype.block_elements();
    match block {
        1 => vec![(1, 1), (17, 33), (40, 64), (16, 7), (3, 130)],
        32 => vec![(1, 32), (17, 96), (70, 576), (16, 256), (170, 288)],
        _ => vec![(1, 256), (17, 512), (70, 768), (170, 768)],
    }
}

#[test]
fn every_format_on_every_level_is_close_to_dequantised_weights() {
    for dtype in DType::ALL {
        for (n, k) in sizes(dtype) {
            let bytes = weights(dtype, n, k, 7);
            for rows in [1, 2, 3, 5, 8, 9, 16, 33] {
                let x = noise(rows * k, 11);
                let (want, lengths) = exact(dtype, n, k, &bytes, &x);
                for (level, math) in needs::levels(Level::ALL, Level::detect())
                    .into_iter()
                    .flat_map(|level| MATHS.map(|math| (level, math)))
                {
                    let got = run(&backend_with(level, 2, math), &[source(dtype, n, k, &bytes)], &x, None);
                    // Rounding activations below 1 to 8 bits changes each by at most 1/254, to 16 bits by at most 1/254^2. The
                    // error of a row grows with its norm, and this allows five standard deviations. Float formats round as
                    // f32; for bf16 tiles activations are two parts of eight bits.
                    let five = 5.0 / 3f64.sqrt();
                    let relative = match (dtype.is_quantised(), math.0) {
                        _ if dtype == DType::BF16 && level == Level::Amx => 1.0 / 65536.0,
                        (true, DecodeMath::Int8) => five / 254.0,
                        (true, DecodeMath::Exact) => five / 254.0 / 254.0 + 2e-6,
                        (false, _) => 2e-6,
                    };
                    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                        let off = (f64::from(*got) - want).abs();
                        let bound = relative * lengths[i % n] + 1e-6;
                        assert!(
                            off <= bound,
                            "{dtype} {n}x{k}, {rows} rows, {level}, {math:?}, {i}: {got} not {want} (bound {bound})"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn quantised_weights_give_the_same_bits_on_every_level() {
    for dtype in DType::ALL.into_iter().filter(|dtype| dtype.is_quantised()) {
        for (n, k) in sizes(dtype) {
            let bytes = weights(dtype, n, k, 3);
            for rows in [1, 2, 4, 7, 12, 20] {
                let x = noise(rows * k, 5);
                for math in MATHS {
                    let bits = |level| {
                        let got = run(&backend_with(level, 1, math), &[source(dtype, n, k, &bytes)], &x, None);
                        got.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                    };
                    let want = bits(Level::Scalar);
                    for level in needs::levels(Level::ALL, Level::detect()) {
                        assert!(bits(level) == want, "{dtype} {n}x{k}, {rows} rows, {level}, {math:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_in_any_batch_and_with_any_number_of_threads() {
    for dtype in DType::ALL {
        // Formats without blocks end with an incomplete group.
        let (n, k) = (50, if dtype.block_elements() == 1 { 515 } else { 512 });
        let bytes = weights(dtype, n, k, 9);
        let x = noise(40 * k, 13);
        for (level, math) in needs::levels(Level::ALL, Level::detect())
            .into_iter()
            .flat_map(|level| [MATHS[0], MATHS[3]].map(|math| (level, math)))
        {
            let backend = |threads| backend_with(level, threads, math);
            let one = backend(1);
            let alone: Vec<Vec<f32>> = (0..40)
                .map(|row| run(&one, &[source(dtype, n, k, &bytes)], &x[row * k..(row + 1) * k], None))
                .collect();
            for (rows, threads) in [(2, 1), (3, 2), (5, 3), (8, 2), (11, 2), (17, 1), (40, 2)] {
                let together = run(&backend(threads), &[source(dtype, n, k, &bytes)], &x[..rows * k], None);
                for (row, (got, want)) in together.chunks_exact(n).zip(&alone).enumerate() {
                    assert!(got == want, "{dtype} {level} {math:?}: row {row} of {rows} with {threads} threads");
                }
            }
        }
    }
}

/// Prefill rows in bf16: the relative error of each factor is at most 2^-9, so that of a product is at most 2^-8. Unless all
/// errors have the same sign, the error of a sum is far below 2^-8 times the norms of its factors. Exact rows are far closer.
#[test]
fn prompt_rows_are_close_to_dequantised_weights() {
    for dtype in DType::ALL {
        for (n, k) in sizes(dtype) {
            let bytes = weights(dtype, n, k, 31);
            for (rows, level, math) in [1, 5, 16, 33, 50].into_iter().flat_map(|rows| {
                needs::levels(Level::ALL, Level::detect())
                    .into_iter()
                    .flat_map(move |level| MATHS[..2].iter().map(move |math| (rows, level, *math)))
            }) {
                let x = noise(rows * k, 7);
                let (want, lengths) = exact(dtype, n, k, &bytes, &x);
                let backend = backend_with(level, 2, math);
                let got = run_rows(&backend, &[source(dtype, n, k, &bytes)], Rows::prefill(rows), &x, None);
                let relative = if math.1 == PrefillMath::Exact { 1.0 / 32768.0 } else { 1.0 / 256.0 };
                for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                    let length = x[i / n * k..(i / n + 1) * k].iter().map(|x| f64::from(x * x)).sum::<f64>().sqrt();
                    let bound = length * lengths[i % n] * relative + 1e-6;
                    let off = (f64::from(*got) - want).abs();
                    let case = format!("{dtype} {n}x{k}, {rows} rows, {level}, {math:?}, {i}");
                    assert!(off <= bound, "{case}: {got} not {want} ({bound})");
                }
            }
        }
    }
}

#[test]
fn a_prompt_row_has_the_same_bits_alone_and_among_others_of_either_role() {
    for dtype in DType::ALL.into_iter().filter(|dtype| dtype.is_quantised()) {
        // More inputs than one unpacked block, and an incomplete last panel.
        let (n, k) = (50, 1280);
        let bytes = weights(dtype, n, k, 9);
        let x = noise(70 * k, 13);
        let parts = [source(dtype, n, k, &bytes)];
        for (level, math) in
            needs::levels(Level::ALL, Level::detect()).into_iter().flat_map(|level| MATHS.map(|math| (level, math)))
        {
            let one = backend_with(level, 1, math);
            let row = |row: usize| &x[row * k..(row + 1) * k];
            for (generated, prompt, threads) in [(0, 2, 1), (1, 16, 2), (3, 17, 2), (0, 33, 1), (20, 50, 3)] {
                let rows = Rows { decode: generated, prefill: prompt };
                let together = run_rows(&backend_with(level, threads, math), &parts, rows, &x[..rows.all() * k], None);
                for (index, got) in together.chunks_exact(n).enumerate() {
                    let alone = if index < generated { Rows::decode(1) } else { Rows::prefill(1) };
                    let want = run_rows(&one, &parts, alone, row(index), None);
                    let case = format!("{dtype} {level} {math:?}");
                    assert!(got == want, "{case}: row {index} of {generated} and {prompt}, {threads} threads");
                }
            }
        }
    }
}

/// Decode rows are equal bit for bit. Prefill rows that are gated directly from the tile unit agree within bf16 rounding.
#[test]
fn a_feed_forward_is_its_three_ops() {
    let shapes = [(DType::Q8_0, 96, 160), (DType::Q4_1, 96, 96), (DType::Q4_K, 256, 512), (DType::BF16, 96, 160)];
    for (dtype, hidden, width) in shapes {
        let [gate, up, down] =
            [(width, hidden, 1), (width, hidden, 2), (hidden, width, 3)].map(|(n, k, seed)| weights(dtype, n, k, seed));
        let (gate, up) = (source(dtype, width, hidden, &gate), source(dtype, width, hidden, &up));
        let down = source(dtype, hidden, width, &down);
        for (level, rows, activation, math) in
            needs::levels(Level::ALL, Level::detect()).into_iter().flat_map(|level| {
                [(0, 1), (1, 0), (3, 0), (16, 0), (2, 5), (2, 19), (0, 40), (0, 77)].into_iter().flat_map(
                    move |(generated, prompt)| {
                        [(Activation::Silu, MATHS[0]), (Activation::GeluTanh, MATHS[0]), (Activation::Silu, MATHS[1])]
                            .map(|(activation, math)| {
                                (level, Rows { decode: generated, prefill: prompt }, activation, math)
                            })
                    },
                )
            })
        {
            let backend = backend_with(level, 2, math);
            let weights =
                Gated { gate_up: backend.matrix(&[gate, up]).unwrap(), down: backend.matrix(&[down]).unwrap() };
            let x = buffer(&backend, rows.all(), hidden, &noise(rows.all() * hidden, 4));
            let [mut inner, mut gated, mut together, mut apart] =
                [2 * width, width, hidden, hidden].map(|cols| backend.buffer(rows.all(), cols).unwrap());
            backend.feed_forward(rows, &mut together, &x, &weights, activation, &mut inner, &mut gated);
            backend.linear(rows, &mut inner, &x, &weights.gate_up, None);
            backend.gate(rows.all(), &mut gated, &inner, activation);
            backend.linear(rows, &mut apart, &gated, &weights.down, None);
            let (together, apart) = (together.rows(rows.all()), apart.rows(rows.all()));
            let case = format!("{dtype} {hidden} {width} {rows:?} {level} {activation:?} {math:?}");
            let is_bf16 = level == Level::Amx && math.1 == PrefillMath::Bf16;
            let exact = if is_bf16 { rows.decode * hidden } else { together.len() };
            assert!(together[..exact] == apart[..exact], "{case}");
            let largest = apart.iter().fold(0f32, |most, value| most.max(value.abs()));
            let off = together.iter().zip(apart).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
            // Of few rows, the largest value is not far above the others.
            assert!(off <= largest / 512.0, "{case}: {off} of {largest}");
        }
    }
}

#[test]
fn a_stack_of_formats_with_a_bias_equals_its_parts() {
    let (k, rows) = (256, 3);
    let (a, b, c) = (weights(DType::Q4_K, 20, k, 1), weights(DType::Q6_K, 7, k, 2), weights(DType::BF16, 33, k, 3));
    let (a, b, c) = (source(DType::Q4_K, 20, k, &a), source(DType::Q6_K, 7, k, &b), source(DType::BF16, 33, k, &c));
    let (x, bias) = (noise(rows * k, 4), noise(60, 5));
    for level in needs::levels(Level::ALL, Level::detect()) {
        let backend = backend(level, 2);
        let stacked = run(&backend, &[a, b, c], &x, Some(&bias));
        let parts = [a, b, c].map(|part| run(&backend, &[part], &x, None));
        for row in 0..rows {
            let want: Vec<f32> =
                parts.iter().flat_map(|p| p[row * p.len() / rows..(row + 1) * p.len() / rows].to_vec()).collect();
            let want: Vec<f32> = want.iter().zip(&bias).map(|(w, b)| w + b).collect();
            assert!(stacked[row * 60..(row + 1) * 60] == want, "{level} row {row}");
        }
    }
}

#[test]
fn parts_of_one_kind_become_one_segment_and_give_the_same_bits() {
    let (k, dtype) = (96, DType::Q4_1);
    for (rows, segments) in
        [(vec![48, 16, 23], vec![87]), (vec![48, 7, 16, 16], vec![55, 32]), (vec![32, 32], vec![32, 32])]
    {
        let bytes: Vec<Vec<u8>> = (1..).zip(&rows).map(|(seed, &rows)| weights(dtype, rows, k, seed)).collect();
        let parts: Vec<MatrixSource<'_>> =
            rows.iter().zip(&bytes).map(|(&rows, bytes)| source(dtype, rows, k, bytes)).collect();
        let x = noise(k, 4);
        for level in needs::levels(Level::ALL, Level::detect()) {
            let backend = backend(level, 2);
            let found = backend.matrix(&parts).unwrap().segments.iter().map(|segment| segment.rows).collect::<Vec<_>>();
            assert_eq!(found, segments);
            let want: Vec<f32> = parts.iter().flat_map(|part| run(&backend, &[*part], &x, None)).collect();
            assert!(run(&backend, &parts, &x, None) == want, "{level}, parts of {rows:?}");
        }
    }
}

#[test]
fn a_packed_row_reads_back_exactly() {
    for dtype in DType::ALL {
        for (n, k) in sizes(dtype) {
            let bytes = weights(dtype, n, k, 21);
            let backend = backend(Level::detect(), 2);
            let matrix = backend.matrix(&[source(dtype, n, k, &bytes)]).unwrap();
            let (mut want, mut got) = (vec![0f32; k], vec![0f32; k]);
            for row in 0..n {
                let len = dtype.row_bytes(k).unwrap();
                quant::dequantise(dtype, &bytes[row * len..(row + 1) * len], &mut want);
                matrix.unpack_row(row, &mut got);
                for (got, want) in got.iter().zip(&want) {
                    assert!((got - want).abs() <= 1e-6 * want.abs().max(1e-3), "{dtype} row {row}: {got} {want}");
                }
            }
        }
    }
}

#[test]
fn a_shape_that_a_format_cannot_hold_is_refused() {
    let bytes = weights(DType::F32, 2, 96, 1);
    let mut part = source(DType::F32, 2, 96, &bytes);
    part.keep = DType::Q4_K;
    assert!(backend(Level::Scalar, 1).matrix(&[part]).is_err());
    part.keep = DType::Q8_0;
    assert!(backend(Level::Scalar, 1).matrix(&[part]).is_ok());
}

#[test]
fn chunks_cover_all_panels_once_and_give_threads_the_same() {
    let shapes = [
        (36, 2, 4, 64),
        (36, 2, 8, 64),
        (256, 2, 8, 64),
        (60, 2, 4, 64),
        (7, 3, 4, 64),
        (1, 2, 8, 64),
        (0, 2, 4, 64),
        (100, 1, 8, 64),
        (9496, 5, 4, usize::MAX),
    ];
    for (total, threads, at_once, most) in shapes {
        let chunks = Chunks::new(total, threads, at_once, most);
        let mut end = 0;
        let mut taken = vec![0; threads];
        for index in 0..chunks.count() {
            let range = chunks.get(index);
            assert!(range.start == end && range.len() <= most, "{range:?} of {total}");
            assert!(range.is_empty() || chunks.is_last(index) || range.end < total, "something follows {range:?}");
            end = range.end;
            taken[index / chunks.each] += range.len();
        }
        assert_eq!(end, total);
        let (least, most) = (taken.iter().min().unwrap(), taken.iter().max().unwrap());
        assert!(most - least <= 3, "{taken:?} of {total}");
    }
}

/// Nearly normally distributed weights. One in 4,001 has a rare power: zero, far smaller or far larger.
fn few_powers(rows: usize, cols: usize, seed: u64) -> Vec<u8> {
    let sums = noise(rows * cols * 12, seed);
    let values = sums.chunks_exact(12).enumerate().map(|(i, sum)| {
        let value = 0.02 * sum.iter().sum::<f32>();
        match i % 4001 {
            0 => value * [0.0, -0.0, 1e-9, 1e9, 1e-20][i / 4001 % 5],
            _ => value,
        }
    });
    values.flat_map(|value| half::bf16::from_f32(value).to_le_bytes()).collect()
}

/// Weights with many different powers.
fn many_powers(rows: usize, cols: usize) -> Vec<u8> {
    (0..rows * cols).flat_map(|i| ((i * 7919 % 16381) as u16 + 0x3000).to_le_bytes()).collect()
}

/// The sampled panels can be packed in 12 bits, the others cannot.
#[test]
fn weights_that_only_seem_short_stay_plain() {
    let (n, k) = (96, 256);
    let (few, many) = (few_powers(16, k, 3), many_powers(16, k));
    let panels = [&few, &many, &many, &few, &many, &many];
    let bytes: Vec<u8> = panels.into_iter().flatten().copied().collect();
    let (x, part) = (noise(2 * k, 5), source(DType::BF16, n, k, &bytes));
    for level in needs::levels(Level::ALL, Level::detect()) {
        let backend = backend(level, 2);
        assert_eq!(backend.matrix(&[part]).unwrap().segments[0].format, Format::Bf16, "{level}");
        let together = run(&backend, &[part], &x, None);
        for (p, panel) in panels.into_iter().enumerate() {
            let alone = run(&backend, &[source(DType::BF16, 16, k, panel)], &x, None);
            for (together, alone) in together.chunks_exact(n).zip(alone.chunks_exact(16)) {
                assert!(&together[p * 16..(p + 1) * 16] == alone, "{level}, panel {p}");
            }
        }
    }
}

/// The unpacked reference is the same weights behind rows with so many powers that the whole matrix stays unpacked.
#[test]
fn short_weights_give_the_same_bits_as_plain_ones() {
    for (n, k) in [(16, 64), (70, 515), (96, 1280)] {
        let bytes = few_powers(n, k, 3);
        let before = n / 16 * 16;
        let both = [many_powers(before, k), bytes.clone()].concat();
        let (short, plain) = (source(DType::BF16, n, k, &bytes), source(DType::BF16, before + n, k, &both));
        for level in needs::levels(Level::ALL, Level::detect()) {
            let backend = backend(level, 2);
            let formats = [short, plain].map(|part| backend.matrix(&[part]).unwrap().segments[0].format);
            let expected_format = if level == Level::Amx { Format::Bf16Packed12 } else { Format::Bf16 };
            assert_eq!(formats, [expected_format, Format::Bf16], "{n}x{k}, {level}");
            for rows in [1, 2, 5, 16, 17, 40] {
                let x = noise(rows * k, 5);
                let (short, plain) = (run(&backend, &[short], &x, None), run(&backend, &[plain], &x, None));
                for (row, (short, plain)) in short.chunks_exact(n).zip(plain.chunks_exact(before + n)).enumerate() {
                    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
                    assert!(bits(short) == bits(&plain[before..]), "{n}x{k}, {level}, row {row} of {rows}");
                }
            }
        }
    }
}
