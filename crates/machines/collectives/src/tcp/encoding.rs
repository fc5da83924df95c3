//! How the terms of a sum are sent: as f32, or rounded to eight bits in blocks of 32 with one scale each. A rank uses
//! its own values rounded too, so that all ranks have the same bits.

use std::ops::Range;

use types::Rank;

const BLOCK: usize = 32;
const SCALE_BYTES: usize = size_of::<f32>();
const Q_MAX: f32 = 127.0;
/// A block whose largest value is smaller becomes zero: the inverse of its scale would not be finite.
const TINY: f32 = 1e-30;
/// At this magnitude the spacing of f32 values is 1.
const ROUNDER: f32 = (3 << 22) as f32;
const LANES: usize = 8;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Encoding {
    #[default]
    F32,
    /// The error is at most 1/254 of the largest value of the block. A block with an infinity or NaN becomes all NaN.
    Q8,
}

impl Encoding {
    pub(super) fn bytes(self, elements: usize) -> usize {
        match self {
            Self::F32 => elements * size_of::<f32>(),
            Self::Q8 => elements + elements.div_ceil(BLOCK) * SCALE_BYTES,
        }
    }

    /// A rank's shard of `elements`, in whole blocks, so that splitting does not change the rounding.
    pub(super) fn shard(self, rank: Rank, elements: usize) -> Range<usize> {
        let unit = match self {
            Self::F32 => 1,
            Self::Q8 => BLOCK,
        };
        let blocks = rank.shard(elements.div_ceil(unit));
        (blocks.start * unit).min(elements)..(blocks.end * unit).min(elements)
    }

    pub(super) fn append(self, values: &[f32], bytes: &mut Vec<u8>) {
        let start = bytes.len();
        bytes.resize(start + self.bytes(values.len()), 0);
        let bytes = &mut bytes[start..];
        match self {
            Self::F32 => {
                let (bytes, _) = bytes.as_chunks_mut();
                bytes.iter_mut().zip(values).for_each(|(bytes, value)| *bytes = value.to_le_bytes());
            }
            Self::Q8 => {
                for (block, bytes) in values.chunks(BLOCK).zip(bytes.chunks_mut(SCALE_BYTES + BLOCK)) {
                    let (scale, quants) = quantise(block);
                    bytes[..SCALE_BYTES].copy_from_slice(&scale.to_le_bytes());
                    bytes[SCALE_BYTES..].iter_mut().zip(quants).for_each(|(byte, quant)| *byte = quant as u8);
                }
            }
        }
    }

    /// Decodes what `append` wrote for as many values.
    pub(super) fn read(self, bytes: &[u8], values: &mut [f32]) {
        self.each(bytes, values, |value, term| *value = term);
    }

    /// Decodes what `append` wrote for as many values, and adds it to `sums`.
    pub(super) fn add(self, bytes: &[u8], sums: &mut [f32]) {
        self.each(bytes, sums, |sum, term| *sum += term);
    }

    /// Rounds `values` to what the other ranks decode.
    pub(super) fn round(self, values: &mut [f32]) {
        match self {
            Self::F32 => {}
            Self::Q8 => values.chunks_mut(BLOCK).for_each(|block| {
                let (scale, quants) = quantise(block);
                block.iter_mut().zip(quants).for_each(|(value, quant)| *value = f32::from(quant) * scale);
            }),
        }
    }

    fn each(self, bytes: &[u8], values: &mut [f32], put: impl Fn(&mut f32, f32)) {
        assert_eq!(bytes.len(), self.bytes(values.len()), "{} values", values.len());
        match self {
            Self::F32 => {
                let (terms, _) = bytes.as_chunks();
                values.iter_mut().zip(terms).for_each(|(value, &term)| put(value, f32::from_le_bytes(term)));
            }
            Self::Q8 => {
                for (values, bytes) in values.chunks_mut(BLOCK).zip(bytes.chunks(SCALE_BYTES + BLOCK)) {
                    let (scale, quants) = bytes.split_first_chunk().expect("a block begins with its scale");
                    let scale = f32::from_le_bytes(*scale);
                    values
                        .iter_mut()
                        .zip(quants)
                        .for_each(|(value, &quant)| put(value, f32::from(quant as i8) * scale));
                }
            }
        }
    }
}

/// The scale of a block and its quants. The block is padded to a constant length, so that the loops are vectorised.
fn quantise(block: &[f32]) -> (f32, [i8; BLOCK]) {
    let mut whole = [0.0; BLOCK];
    whole[..block.len()].copy_from_slice(block);
    // Zero times infinity or NaN is NaN, which makes the sum NaN; a maximum would ignore NaN.
    let mut poison = [0.0; LANES];
    let mut largest = [0.0_f32; LANES];
    for values in whole.as_chunks::<LANES>().0 {
        poison.iter_mut().zip(values).for_each(|(poison, value)| *poison += value * 0.0);
        largest.iter_mut().zip(values).for_each(|(largest, value)| *largest = largest.max(value.abs()));
    }
    let poison = poison.iter().sum::<f32>().abs();
    let largest = largest.iter().fold(0.0_f32, |largest, value| largest.max(*value));
    if largest < TINY {
        return (poison, [0; BLOCK]);
    }
    let inverse = Q_MAX / largest;
    // The low bits of the f32 sum are the nearest integer.
    let quants = whole.map(|value| (value * inverse + ROUNDER).to_bits() as i8);
    (largest / Q_MAX + poison, quants)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use types::WorldSize;

    use super::*;

    fn rounded(values: &[f32]) -> Vec<f32> {
        let mut rounded = values.to_vec();
        Encoding::Q8.round(&mut rounded);
        rounded
    }

    #[test]
    fn what_is_not_finite_stays_visible() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = [1.0; 40];
            values[3] = bad;
            let found = rounded(&values);
            assert!(found[..32].iter().all(|value| value.is_nan()), "{bad}");
            assert_eq!(found[32..], [1.0; 8]);
        }
    }

    #[test]
    fn the_smallest_and_largest_numbers_do_no_harm() {
        for value in [0.0, -0.0, f32::from_bits(1), f32::MIN_POSITIVE, f32::MAX / 2.0, f32::MIN / 2.0] {
            let found = rounded(&[value, 0.0])[0];
            assert!(found.is_finite() && (found - value).abs() <= value.abs(), "{value} became {found}");
        }
    }

    proptest! {
        #[test]
        fn rounding_is_off_by_half_a_step_at_most(values in prop::collection::vec(-1e6_f32..1e6, 1..100)) {
            let found = rounded(&values);
            for (block, found) in values.chunks(BLOCK).zip(found.chunks(BLOCK)) {
                let largest = block.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
                for (value, found) in block.iter().zip(found) {
                    prop_assert!((value - found).abs() <= largest / 254.0 * 1.0001 + TINY, "{value} became {found}");
                }
            }
        }

        #[test]
        fn the_sender_has_the_bits_that_the_others_read(values in prop::collection::vec(any::<f32>(), 0..100), is_q8: bool) {
            let encoding = if is_q8 { Encoding::Q8 } else { Encoding::F32 };
            let (mut bytes, mut own, mut read) = (Vec::new(), values.clone(), vec![0.0; values.len()]);
            encoding.append(&values, &mut bytes);
            prop_assert_eq!(bytes.len(), encoding.bytes(values.len()));
            encoding.read(&bytes, &mut read);
            encoding.round(&mut own);
            for (own, read) in own.iter().zip(&read) {
                prop_assert!(own.to_bits() == read.to_bits() || own.is_nan() && read.is_nan());
            }
        }

        #[test]
        fn shares_cover_everything_in_whole_blocks(world in 1_u16..6, elements in 0_usize..500) {
            let mut next = 0;
            for rank in WorldSize::new(world).unwrap().ranks() {
                let shard = Encoding::Q8.shard(rank, elements);
                prop_assert!(shard.start == next && (shard.start.is_multiple_of(BLOCK) || shard.start == elements));
                prop_assert_eq!(Encoding::F32.shard(rank, elements), rank.shard(elements));
                next = shard.end;
            }
            prop_assert_eq!(next, elements);
        }
    }
}
