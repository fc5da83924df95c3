//! Weights in f32, f16 and (without tiles) bf16: widened to f32 and multiplied with f32 activations.
//!
//! There is one accumulator per output, and inputs are summed in ascending order. bf16, whose inputs are stored in pairs, has
//! one accumulator for even and one for odd inputs, added at the end.

use std::ops::Range;

use super::super::lanes::for_each_level;
use super::super::level::Level;
use super::super::matrix::{Format, MatrixSegment, PANEL};
use super::{Inputs, Output};

for_each_level! {
    /// `R` rows from `row` by `P` panels from `panel`.
    unsafe fn f32_block<const R: usize, const P: usize>(segment: &MatrixSegment, panel: usize, row: usize, inputs: &Inputs<'_>, out: Output<'_>) {
        let cols = segment.cols;
        let weights: [*const f32; P] = std::array::from_fn(|p| segment.panel(panel + p).as_ptr().cast());
        let x = inputs.x.as_ptr().add(row * cols);
        let mut sums = [[splat(0.0); P]; R];
        for k in 0..cols {
            for p in 0..P {
                let w = load(weights[p].add(k * PANEL));
                for r in 0..R {
                    sums[r][p] = fma(splat(*x.add(r * cols + k)), w, sums[r][p]);
                }
            }
        }
        put_block(segment, panel, row, out, sums);
    }

    unsafe fn f16_block<const R: usize, const P: usize>(segment: &MatrixSegment, panel: usize, row: usize, inputs: &Inputs<'_>, out: Output<'_>) {
        let cols = segment.cols;
        let weights: [*const u16; P] = std::array::from_fn(|p| segment.panel(panel + p).as_ptr().cast());
        let x = inputs.x.as_ptr().add(row * cols);
        let mut sums = [[splat(0.0); P]; R];
        for k in 0..cols {
            for p in 0..P {
                let w = load_f16(weights[p].add(k * PANEL));
                for r in 0..R {
                    sums[r][p] = fma(splat(*x.add(r * cols + k)), w, sums[r][p]);
                }
            }
        }
        put_block(segment, panel, row, out, sums);
    }

    unsafe fn bf16_block<const R: usize, const P: usize>(segment: &MatrixSegment, panel: usize, row: usize, inputs: &Inputs<'_>, out: Output<'_>) {
        let cols = segment.cols;
        let weights: [*const u16; P] = std::array::from_fn(|p| segment.panel(panel + p).as_ptr().cast());
        let x = inputs.x.as_ptr().add(row * cols);
        let (mut evens, mut odds) = ([[splat(0.0); P]; R], [[splat(0.0); P]; R]);
        for pair in 0..cols / 2 {
            for p in 0..P {
                let (even, odd) = load_bf16_pairs(weights[p].add(pair * 2 * PANEL));
                for r in 0..R {
                    let x = x.add(r * cols + pair * 2);
                    evens[r][p] = fma(splat(*x), even, evens[r][p]);
                    odds[r][p] = fma(splat(*x.add(1)), odd, odds[r][p]);
                }
            }
        }
        if cols % 2 == 1 {
            for p in 0..P {
                let (even, _) = load_bf16_pairs(weights[p].add((cols - 1) * PANEL));
                for r in 0..R {
                    evens[r][p] = fma(splat(*x.add(r * cols + cols - 1)), even, evens[r][p]);
                }
            }
        }
        for r in 0..R {
            for p in 0..P {
                evens[r][p] = add(evens[r][p], odds[r][p]);
            }
        }
        put_block(segment, panel, row, out, evens);
    }

    unsafe fn put_block<const R: usize, const P: usize>(segment: &MatrixSegment, panel: usize, row: usize, out: Output<'_>, sums: [[V; P]; R]) {
        for r in 0..R {
            for p in 0..P {
                let mut values = [0f32; PANEL];
                store(values.as_mut_ptr(), sums[r][p]);
                out.put(row + r, panel + p, segment.rows, &values);
            }
        }
    }

    /// All rows of `P` panels, in blocks that fill the registers.
    unsafe fn all_rows<const P: usize, const MANY: usize>(segment: &MatrixSegment, panel: usize, inputs: &Inputs<'_>, out: Output<'_>) {
        let mut row = 0;
        while row < inputs.rows {
            let many = inputs.rows - row >= MANY;
            match (segment.format, many) {
                (Format::F32, true) => f32_block::<MANY, P>(segment, panel, row, inputs, out),
                (Format::F32, false) => f32_block::<1, P>(segment, panel, row, inputs, out),
                (Format::F16, true) => f16_block::<MANY, P>(segment, panel, row, inputs, out),
                (Format::F16, false) => f16_block::<1, P>(segment, panel, row, inputs, out),
                (_, true) => bf16_block::<MANY, P>(segment, panel, row, inputs, out),
                (_, false) => bf16_block::<1, P>(segment, panel, row, inputs, out),
            }
            row += if many { MANY } else { 1 };
        }
    }

    unsafe fn panels(segment: &MatrixSegment, panels: Range<usize>, inputs: &Inputs<'_>, out: Output<'_>) {
        let mut panel = panels.start;
        while panel < panels.end {
            match (panels.end - panel, inputs.rows) {
                // Four panels at once for few rows: four streams from memory are faster than one.
                (4.., 1..=3) => { all_rows::<4, 2>(segment, panel, inputs, out); panel += 4; }
                (2.., _) if REGISTERS >= 32 => { all_rows::<2, 4>(segment, panel, inputs, out); panel += 2; }
                // bf16 has two accumulators per output.
                _ if REGISTERS < 16 && segment.format == Format::Bf16 => {
                    all_rows::<1, 3>(segment, panel, inputs, out);
                    panel += 1;
                }
                _ => { all_rows::<1, 4>(segment, panel, inputs, out); panel += 1; }
            }
        }
    }
}

pub(super) fn panels(level: Level, segment: &MatrixSegment, range: Range<usize>, inputs: &Inputs<'_>, out: Output<'_>) {
    // SAFETY: the CPU has `level` (`CpuBackend::new` checks it), and the caller gives each panel of `out` to one thread.
    unsafe {
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Amx | Level::Avx512 => avx512::panels(segment, range, inputs, out),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => avx2::panels(segment, range, inputs, out),
            _ => scalar::panels(segment, range, inputs, out),
        }
    }
}
