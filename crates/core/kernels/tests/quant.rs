//! Compares the block formats with PyPI's `gguf` (files in `fixtures/quant`, written by `make.py` there) and llama.cpp.

use std::path::Path;

use kernels::quant::{can_quantise, decode_block32, dequantise, quantise, superblock, zero_point};
use types::DType;

const WRITTEN: [DType; 10] = [
    DType::Q8_0,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q2_K,
    DType::Q3_K,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
];

#[test]
fn every_format_reads_as_the_reference_reads_it_bit_for_bit() {
    for dtype in DType::ALL {
        let (bytes, want) = (fixture(&format!("{dtype}.bytes")), floats(&fixture(&format!("{dtype}.f32"))));
        assert_eq!(bits(&dequantised(dtype, &bytes)), bits(&want), "{dtype}");
    }
}

#[test]
fn the_integers_and_scales_of_a_block_give_its_weights() {
    for dtype in DType::ALL.into_iter().filter(|dtype| dtype.is_quantised()) {
        let bytes = fixture(&format!("{dtype}.bytes"));
        for block in bytes.chunks_exact(dtype.block_bytes()) {
            for (i, weight) in dequantised(dtype, block).into_iter().enumerate() {
                let rebuilt = if dtype.block_elements() == 32 {
                    let group = decode_block32(dtype, block);
                    let quant = f32::from(group.quants[i]) - f32::from(zero_point(dtype));
                    group.scale.to_f32() * quant + group.min.to_f32()
                } else {
                    let block = superblock(dtype, block);
                    let group = if matches!(dtype, DType::Q4_K | DType::Q5_K) { i / 32 } else { i / 16 };
                    let quant = f32::from(block.quants[i]) - f32::from(zero_point(dtype));
                    let scale = block.d.to_f32() * f32::from(block.scales[group]);
                    scale * quant - block.dmin.to_f32() * f32::from(block.mins[group])
                };
                assert_eq!(rebuilt, weight, "{dtype} weight {i}");
            }
        }
    }
}

#[test]
fn the_simple_formats_are_written_as_the_reference_writes_them() {
    let values = floats(&fixture("values.f32"));
    for dtype in [DType::Q8_0, DType::Q4_0] {
        assert_eq!(quantised(dtype, &values), fixture(&format!("values.{dtype}")), "{dtype}");
    }
}

#[test]
fn the_error_on_noise_is_no_larger_than_llama_cpps() {
    // Root mean square errors of llama.cpp's `quantize_row_*_ref` on the same noise.
    let peer = [
        (DType::Q8_0, 0.0052767),
        (DType::Q4_0, 0.0849589),
        (DType::Q4_K, 0.0704155),
        (DType::Q5_K, 0.0357000),
        (DType::Q6_K, 0.0175379),
    ];
    let values = noise(65536, 7);
    for (dtype, peer) in peer {
        let error = rmse(&values, &round_trip(dtype, &values));
        assert!(error <= peer + 5e-8, "{dtype}: {error} against {peer}");
    }
}

#[test]
fn a_bit_more_about_halves_the_error() {
    let values = noise(65536, 7);
    let error = |dtype| rmse(&values, &round_trip(dtype, &values));
    for (more, less) in [
        (DType::Q5_0, DType::Q4_0),
        (DType::Q5_1, DType::Q4_1),
        (DType::Q3_K, DType::Q2_K),
        (DType::Q4_K, DType::Q3_K),
        (DType::Q5_K, DType::Q4_K),
    ] {
        let ratio = error(more) / error(less);
        assert!((0.35..0.7).contains(&ratio), "{more} over {less}: {ratio}");
    }
    assert!(error(DType::Q4_1) < error(DType::Q4_0), "the levels of one reach from end to end");
}

#[test]
fn written_blocks_are_read_with_each_weight_in_its_place() {
    // Every value is a level of its group, and no two groups are equal.
    for dtype in WRITTEN {
        let levels = if dtype == DType::Q2_K { 4 } else { 8 };
        let values: Vec<f32> = (0..512usize)
            .map(|i| {
                let (group, level) = (i / 16 % 16, (i * 7 + i / 16) % levels);
                (level as f32 - if dtype == DType::Q3_K { 4.0 } else { 0.0 }) * (1.0 + group as f32)
            })
            .collect();
        let error = rmse(&values, &round_trip(dtype, &values));
        let size = rmse(&values, &vec![0.0; values.len()]);
        assert!(error < 0.1 * size, "{dtype}: {error} of {size}");
    }
}

#[test]
fn the_error_follows_the_size_of_the_weights() {
    let values = noise(4096, 3);
    for dtype in WRITTEN {
        let error = rmse(&values, &round_trip(dtype, &values));
        for factor in [1e-2f32, 1e2, 1e4] {
            let scaled: Vec<f32> = values.iter().map(|value| factor * value).collect();
            let ratio = rmse(&scaled, &round_trip(dtype, &scaled)) / f64::from(factor) / error;
            assert!((0.97..1.03).contains(&ratio), "{dtype} at {factor}: {ratio}");
        }
    }
}

#[test]
fn zeros_stay_zeros() {
    for dtype in WRITTEN {
        assert!(round_trip(dtype, &[0.0; 512]).into_iter().all(|value| value == 0.0), "{dtype}");
    }
}

#[test]
fn constants_stay_constant_to_the_precision_of_a_scale() {
    for dtype in WRITTEN {
        for constant in [1.0f32, -1.0, 0.37, -1234.5, 3e-3] {
            for value in round_trip(dtype, &[constant; 256]) {
                // Half a step of a 6-bit scale.
                assert!((value / constant - 1.0).abs() < 0.5 / 63.0, "{dtype}: {constant} became {value}");
            }
        }
    }
}

#[test]
fn a_group_of_one_sign_and_an_outlier_are_kept() {
    for dtype in WRITTEN {
        for sign in [1.0f32, -1.0] {
            let mut values: Vec<f32> = noise(256, 5).into_iter().map(|value| sign * value.abs()).collect();
            values[77] = sign * 30.0;
            let read = round_trip(dtype, &values);
            assert!((read[77] / values[77] - 1.0).abs() < 0.05, "{dtype}: {} became {}", values[77], read[77]);
            assert!(read.iter().all(|value| value * sign > -2.5), "{dtype}");
        }
    }
}

#[test]
fn nan_is_written_as_zero_and_infinities_as_large_numbers() {
    for dtype in WRITTEN {
        let mut values = noise(256, 11);
        let without: Vec<f32> = values.iter().enumerate().map(|(i, v)| if i % 7 == 0 { 0.0 } else { *v }).collect();
        for value in values.iter_mut().step_by(7) {
            *value = f32::NAN;
        }
        assert_eq!(quantised(dtype, &values), quantised(dtype, &without), "{dtype}");

        values[100] = f32::INFINITY;
        values[200] = f32::NEG_INFINITY;
        let read = round_trip(dtype, &values);
        assert!(read[100] > 4e5 && read[100].is_finite(), "{dtype}: {}", read[100]);
        assert!(read[200] < -4e5 && read[200].is_finite(), "{dtype}: {}", read[200]);
    }
}

#[test]
fn any_bits_give_finite_weights() {
    let mut random = SplitMix(13);
    for dtype in WRITTEN {
        for round in 0..200 {
            // Whole blocks of one size class, from denormals to the largest, and blocks of everything at once.
            let values: Vec<f32> = (0..256)
                .map(|_| {
                    let bits = random.next() as u32;
                    if round < 100 {
                        f32::from_bits(bits & 0x803f_ffff | (round * 3) << 22)
                    } else {
                        f32::from_bits(bits)
                    }
                })
                .collect();
            let read = round_trip(dtype, &values);
            assert!(read.iter().all(|value| value.is_finite()), "{dtype} round {round}");
        }
    }
}

#[test]
fn values_beyond_f16_scales_saturate() {
    for dtype in WRITTEN {
        for value in round_trip(dtype, &[1e30; 256]) {
            assert!(value > 5e5 && value.is_finite(), "{dtype}: {value}");
        }
        assert!(round_trip(dtype, &[1e-42; 256]).into_iter().all(|value| value == 0.0), "{dtype}");
    }
}

#[test]
fn only_the_named_formats_are_written() {
    for dtype in DType::ALL {
        assert_eq!(can_quantise(dtype), WRITTEN.contains(&dtype), "{dtype}");
    }
}

#[test]
#[should_panic(expected = "bytes of 64 q8_0 weights")]
fn a_buffer_of_the_wrong_length_is_our_own_mistake() {
    dequantise(DType::Q8_0, &[0; 34], &mut [0.0; 64]);
}

fn fixture(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quant").join(name);
    std::fs::read(&path).unwrap_or_else(|err| panic!("{}: {err}", path.display()))
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn dequantised(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let mut out = vec![f32::NAN; bytes.len() / dtype.block_bytes() * dtype.block_elements()];
    dequantise(dtype, bytes, &mut out);
    out
}

fn quantised(dtype: DType, values: &[f32]) -> Vec<u8> {
    let mut out = vec![0xa5; dtype.row_bytes(values.len()).expect("whole blocks")];
    quantise(dtype, values, &mut out);
    out
}

fn round_trip(dtype: DType, values: &[f32]) -> Vec<f32> {
    dequantised(dtype, &quantised(dtype, values))
}

fn rmse(a: &[f32], b: &[f32]) -> f64 {
    let sum: f64 = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    (sum / a.len() as f64).sqrt()
}

/// Nearly gaussian, of unit variance: sums of twelve uniform numbers, exact in f32 so that any language can repeat it.
fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut random = SplitMix(seed);
    let mut four = || {
        let bits = random.next();
        (0..4).map(|i| (bits >> (16 * i)) as u16 as u32).sum::<u32>()
    };
    (0..len).map(|_| (four() + four() + four()) as f32 / 65536.0 - 6.0).collect()
}

struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}
