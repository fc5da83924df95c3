//! Files with random small damage: each is accepted or refused, and accepted tensors are in bounds.

use model::files::{Gguf, SafeTensors};
use proptest::prelude::*;
use proptest::sample::Index;

use testing::model_files::{gguf_sample, safetensors_sample};

/// Reads all bytes of all tensors of a GGUF file; true if it was accepted.
fn gguf(bytes: Vec<u8>) -> bool {
    let Ok(file) = Gguf::parse(bytes) else { return false };
    for name in file.tensor_names() {
        let view = file.tensor(name).unwrap();
        assert_eq!(view.dtype.row_bytes(view.shape.iter().product()), Some(view.bytes.len()));
    }
    for (_, value) in file.metadata() {
        if let Some(strings) = value.as_strings() {
            assert_eq!(strings.iter().count(), strings.len());
        }
    }
    true
}

fn safetensors(bytes: Vec<u8>) -> bool {
    let Ok(file) = SafeTensors::parse(bytes) else { return false };
    for name in file.tensor_names() {
        if let Ok(view) = file.tensor(name) {
            let view = view.unwrap();
            assert_eq!(view.dtype.row_bytes(view.shape.iter().product()), Some(view.bytes.len()));
        }
    }
    true
}

#[test]
fn a_file_cut_at_any_byte_is_refused() {
    for (whole, read) in [(gguf_sample().bytes(), gguf as fn(Vec<u8>) -> bool), (safetensors_sample(), safetensors)] {
        assert!(read(whole.clone()));
        for len in 0..whole.len() {
            assert!(!read(whole[..len].to_vec()), "accepted with {len} of {} bytes", whole.len());
        }
    }
}

#[test]
fn every_byte_may_have_any_value() {
    for (whole, read) in [(gguf_sample().bytes(), gguf as fn(Vec<u8>) -> bool), (safetensors_sample(), safetensors)] {
        for at in 0..whole.len() {
            for value in [0, 1, 0x7f, 0x80, 0xff, whole[at] ^ 1, whole[at] ^ 0x20, whole[at].wrapping_add(1)] {
                let mut damaged = whole.clone();
                damaged[at] = value;
                read(damaged);
            }
        }
    }
}

/// One change to a file, at a position that is chosen when the length is known.
#[derive(Clone, Debug)]
enum Damage {
    Set(Index, u8),
    Number(Index, u64),
    Remove(Index, u8),
    Insert(Index, Vec<u8>),
    Copy(Index, Index, u8),
}

impl Damage {
    fn apply(&self, bytes: &mut Vec<u8>) {
        let len = bytes.len();
        let until = |at: usize, count: u8| (at + usize::from(count)).min(len);
        match self {
            _ if bytes.is_empty() => {}
            Self::Set(at, value) => bytes[at.index(len)] = *value,
            Self::Number(at, number) => {
                let at = at.index(len);
                bytes[at..until(at, 8)].copy_from_slice(&number.to_le_bytes()[..until(at, 8) - at]);
            }
            Self::Remove(at, count) => {
                let at = at.index(len);
                bytes.drain(at..until(at, *count));
            }
            Self::Insert(at, more) => {
                let at = at.index(len);
                bytes.splice(at..at, more.iter().copied());
            }
            Self::Copy(from, to, count) => {
                let from = from.index(len);
                let piece = bytes[from..until(from, *count)].to_vec();
                let to = to.index(len);
                bytes.splice(to..to, piece);
            }
        }
    }
}

fn damage() -> impl Strategy<Value = Vec<Damage>> {
    let number = prop_oneof![any::<u64>(), 0u64..300, (0u32..64).prop_map(|bit| 1 << bit), Just(u64::MAX)];
    let one = prop_oneof![
        (any::<Index>(), any::<u8>()).prop_map(|(at, value)| Damage::Set(at, value)),
        (any::<Index>(), number).prop_map(|(at, number)| Damage::Number(at, number)),
        (any::<Index>(), any::<u8>()).prop_map(|(at, count)| Damage::Remove(at, count)),
        (any::<Index>(), prop::collection::vec(any::<u8>(), 1..20)).prop_map(|(at, more)| Damage::Insert(at, more)),
        (any::<Index>(), any::<Index>(), any::<u8>()).prop_map(|(from, to, count)| Damage::Copy(from, to, count)),
    ];
    prop::collection::vec(one, 1..6)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2000) })]

    #[test]
    fn a_damaged_file_is_read_or_refused(damage in damage()) {
        for (mut bytes, read) in
            [(gguf_sample().bytes(), gguf as fn(Vec<u8>) -> bool), (safetensors_sample(), safetensors)]
        {
            damage.iter().for_each(|damage| damage.apply(&mut bytes));
            read(bytes);
        }
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        gguf([&b"GGUF\x03\0\0\0"[..], &bytes].concat());
        safetensors([&(bytes.len() as u64).to_le_bytes(), &bytes[..]].concat());
    }
}
