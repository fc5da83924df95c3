//! Hashes the files of a model without reading them whole: their headers, and samples of every tensor.

use blake3::Hasher;

use super::map::FileBytes;
use super::tensors::Table;

/// Bytes of one sample.
const SAMPLE_BYTES: usize = 4 << 10;
/// The fewest samples of a tensor. A tensor that is no longer than they are is hashed whole.
const SAMPLES_MIN: usize = 4;
/// A long tensor has one sample in each part of this size.
const SAMPLE_DISTANCE: usize = 8 << 20;
/// The most bytes before a file's first tensor that are hashed. No header comes near it.
const HEADER_BYTES_MAX: usize = 64 << 20;

/// Hashes for each file its length and its header, which has the names, formats, shapes and positions of the tensors, and for
/// each tensor its name, its length and its samples.
pub fn hash_sampled<D>(hash: &mut Hasher, files: &[FileBytes], tensors: &Table<D>) {
    let mut tensors: Vec<_> = tensors.iter().collect();
    // As they are stored, so that a disk is read in one direction.
    tensors.sort_unstable_by_key(|tensor| (tensor.file, tensor.range.start, tensor.range.end, &tensor.name));
    for (number, bytes) in files.iter().enumerate() {
        let first = tensors.partition_point(|tensor| (tensor.file as usize) < number);
        let end = tensors.partition_point(|tensor| (tensor.file as usize) <= number);
        let header = tensors[first..end].first().map_or(bytes.len(), |tensor| tensor.range.start);
        hash.update(&(bytes.len() as u64).to_le_bytes());
        hash_with_length(hash, &bytes[..header.min(HEADER_BYTES_MAX)]);
        for tensor in &tensors[first..end] {
            hash_with_length(hash, tensor.name.as_bytes());
            hash_samples(hash, &bytes[tensor.range.clone()]);
        }
    }
}

/// Hashes a field so that it cannot be confused with the one after it.
fn hash_with_length(hash: &mut Hasher, field: &[u8]) {
    hash.update(&(field.len() as u64).to_le_bytes()).update(field);
}

/// Hashes the length of a tensor and its samples, which are evenly spaced from the first byte to the last.
fn hash_samples(hash: &mut Hasher, tensor: &[u8]) {
    if tensor.len() <= SAMPLES_MIN * SAMPLE_BYTES {
        return hash_with_length(hash, tensor);
    }
    hash.update(&(tensor.len() as u64).to_le_bytes());
    let samples = SAMPLES_MIN.max(tensor.len() / SAMPLE_DISTANCE + 1);
    let last = tensor.len() - SAMPLE_BYTES;
    let spacing = last / (samples - 1);
    for start in (0..samples - 1).map(|index| index * spacing).chain([last]) {
        hash.update(&tensor[start..start + SAMPLE_BYTES]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(tensor: &[u8]) -> blake3::Hash {
        let mut hash = Hasher::new();
        hash_samples(&mut hash, tensor);
        hash.finalize()
    }

    #[test]
    fn the_first_and_the_last_byte_of_a_tensor_are_in_its_samples() {
        for length in [1, SAMPLE_BYTES, 4 * SAMPLE_BYTES, 4 * SAMPLE_BYTES + 1, 3 * SAMPLE_DISTANCE + 7] {
            let tensor = vec![7; length];
            for changed in [0, length - 1] {
                let mut other = tensor.clone();
                other[changed] = 8;
                assert_ne!(digest(&tensor), digest(&other), "byte {changed} of {length}");
            }
            assert_ne!(digest(&tensor), digest(&vec![7; length + 1]), "{length} bytes and one more");
        }
    }

    #[test]
    fn a_long_tensor_has_a_sample_in_each_of_its_parts() {
        let tensor = vec![7; 5 * SAMPLE_DISTANCE];
        for part in 0..5 {
            let mut other = tensor.clone();
            other[part * SAMPLE_DISTANCE..(part + 1) * SAMPLE_DISTANCE].fill(8);
            assert_ne!(digest(&tensor), digest(&other), "part {part}");
        }
    }
}
