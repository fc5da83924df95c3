//! Golden bytes, round trips of generated messages, and bytes that are wrong.

use half::f16;
use proptest::prelude::*;

use super::*;

const VARIANTS: [CakeVariant; 2] = [CakeVariant::Head, CakeVariant::Older];

/// Bytes written in hexadecimal; spaces do not count.
fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u32> = hex.chars().filter_map(|digit| digit.to_digit(16)).collect();
    digits.chunks_exact(2).map(|pair| (pair[0] * 16 + pair[1]) as u8).collect()
}

/// The payload of a frame.
fn payload(frame: &[u8]) -> &[u8] {
    let (header, payload) = frame.split_first_chunk().unwrap();
    assert_eq!(payload_bytes(*header, FRAME_BYTES_MAX), Ok(payload.len()));
    payload
}

fn check_golden(hex: &str, message: &CakeMessage<'_>) {
    let frame = bytes(hex);
    for variant in VARIANTS {
        assert_eq!(message.encode(variant).as_deref(), Ok(&frame[..]));
        assert_eq!(CakeMessage::decode(payload(&frame), variant).as_ref(), Ok(message));
    }
    assert_eq!(CakeVariant::of(payload(&frame)), None);
}

#[test]
fn the_reference_bytes_are_written_and_read() {
    check_golden("0104f4c7 00000004 00000000", &CakeMessage::Hello);
    check_golden("0104f4c7 00000004 00000005", &CakeMessage::Goodbye);
    check_golden("0104f4c7 00000005 00000007 01", &CakeMessage::LayerAssignmentAck { needs_data: true });
    let data: Vec<u8> = [1.0, -2.0].into_iter().flat_map(|value| f16::from_f32(value).to_le_bytes()).collect();
    let tensor = CakeTensor::new(&data, CakeDType::F16, vec![1, 1, 2]).unwrap();
    check_golden(
        "0104f4c7 00000029 00000004 00000004 003c00c0 04 00000003 0000000000000001 0000000000000001 0000000000000002",
        &CakeMessage::Tensor(tensor),
    );
    let x = CakeTensor::new(&data[..2], CakeDType::F16, vec![1, 1, 1]).unwrap();
    let op = CakeOp { layer: "model.layers.5", position: 7, block: 5 };
    check_golden(
        "0104f4c7 00000049 00000002 0000000e 6d6f64656c2e6c61796572732e35 00000002 003c 04 00000003 \
         0000000000000001 0000000000000001 0000000000000001 0000000000000007 0000000000000005",
        &CakeMessage::SingleOp { x, op },
    );
    let info = CakeWorkerInfo {
        version: "0.1.0",
        dtype: "F16",
        os: "linux",
        arch: "x86_64",
        device: "cpu",
        device_index: 0,
        latency_ms: 0,
    };
    check_golden(
        "0104f4c7 00000046 00000001 00000005 302e312e30 00000003 463136 00000005 6c696e7578 00000006 7838365f3634 \
         00000003 637075 0000000000000000 00000000000000000000000000000000",
        &CakeMessage::WorkerInfo(info),
    );
}

fn check_of_variant(hex: &str, variant: CakeVariant, message: &CakeMessage<'_>) {
    let frame = bytes(hex);
    assert_eq!(message.encode(variant).as_deref(), Ok(&frame[..]));
    assert_eq!(CakeVariant::of(payload(&frame)), Some(variant), "{message:?}");
    assert_eq!(CakeMessage::decode(payload(&frame), variant).as_ref(), Ok(message));
}

#[test]
fn the_variants_differ_in_three_messages() {
    let (ready, error) = (CakeMessage::WorkerReady, CakeMessage::WorkerError { message: "no" });
    check_of_variant("0104f4c7 00000004 0000000b", CakeVariant::Head, &ready);
    check_of_variant("0104f4c7 00000004 0000000a", CakeVariant::Older, &ready);
    check_of_variant("0104f4c7 0000000a 0000000c 00000002 6e6f", CakeVariant::Head, &error);
    check_of_variant("0104f4c7 0000000a 0000000b 00000002 6e6f", CakeVariant::Older, &error);
    let check = Some(CakeChunkCheck { is_compressed: false, crc: 0x352441c2 });
    let chunk = CakeChunk { file: "f", offset: 0, total_bytes: 3, check, data: b"abc" };
    let common = "00000008 00000001 66 0000000000000000 0000000000000003";
    check_of_variant(
        &format!("0104f4c7 00000025 {common} 00 352441c2 00000003 616263"),
        CakeVariant::Head,
        &CakeMessage::ModelDataChunk(chunk.clone()),
    );
    check_of_variant(
        &format!("0104f4c7 00000020 {common} 00000003 616263"),
        CakeVariant::Older,
        &CakeMessage::ModelDataChunk(CakeChunk { check: None, ..chunk }),
    );
}

#[test]
fn a_chunk_that_fits_both_variants_is_told_by_its_checksum() {
    // The data of an older chunk that also reads as the last byte of a checksum, a count, and five bytes.
    let data = bytes("ca 00000005 aabbccddee");
    let older = CakeChunk { file: "f", offset: 0, total_bytes: 10, check: None, data: &data[..] };
    let frame = CakeMessage::ModelDataChunk(older).encode(CakeVariant::Older).unwrap();
    assert!(CakeMessage::decode(payload(&frame), CakeVariant::Head).is_ok());
    assert_eq!(CakeVariant::of(payload(&frame)), Some(CakeVariant::Older));
}

#[test]
fn a_message_of_the_other_variant_is_not_written() {
    let resume = CakeMessage::ModelDataResume { file: "f", offset: 1 };
    assert!(resume.encode(CakeVariant::Head).is_ok());
    assert_eq!(resume.encode(CakeVariant::Older), Err(CakeWireError::NotInVariant));
    let chunk = CakeMessage::ModelDataChunk(CakeChunk { file: "f", offset: 0, total_bytes: 0, check: None, data: &[] });
    assert_eq!(chunk.encode(CakeVariant::Head), Err(CakeWireError::NotInVariant));
}

#[test]
fn a_header_is_refused_before_its_payload_is_read() {
    let header = |hex| <[u8; FRAME_HEADER_BYTES]>::try_from(bytes(hex)).unwrap();
    assert_eq!(payload_bytes(header("0104f4c7 20000000"), usize::MAX), Ok(FRAME_BYTES_MAX));
    let max = FRAME_BYTES_MAX;
    assert_eq!(
        payload_bytes(header("0104f4c7 20000001"), usize::MAX),
        Err(CakeWireError::FrameTooLong { bytes: max + 1, max })
    );
    assert_eq!(payload_bytes(header("0104f4c7 00000005"), 4), Err(CakeWireError::FrameTooLong { bytes: 5, max: 4 }));
    assert_eq!(payload_bytes(header("c7f40401 00000004"), max), Err(CakeWireError::Magic));
}

fn check_refused(hex: &str, error: &CakeWireError) {
    for variant in VARIANTS {
        assert_eq!(CakeMessage::decode(&bytes(hex), variant).as_ref(), Err(error));
    }
}

#[test]
fn tensors_that_contradict_themselves_are_refused() {
    use CakeWireError::{TensorBytes, TooMany, Truncated, UnknownDType};
    // Three bytes are not two f16.
    check_refused(
        "00000004 00000003 aabbcc 04 00000001 0000000000000002",
        &TensorBytes { dtype: CakeDType::F16, shape: vec![2], bytes: 3 },
    );
    // The product of the dimensions overflows, to zero.
    check_refused(
        "00000004 00000000 05 00000002 8000000000000000 0000000000000002",
        &TensorBytes { dtype: CakeDType::F32, shape: vec![1 << 63, 2], bytes: 0 },
    );
    check_refused("00000004 00000000 ff 00000000", &UnknownDType(255));
    check_refused("00000004 00000000 08 00000000", &UnknownDType(8));
    check_refused("00000004 7fffffff 00", &Truncated("tensor data"));
    check_refused("00000004 00000000 00 00000009", &TooMany { what: "dimensions", found: 9, max: 8 });
    check_refused("00000004 00000000 00 00000002 0000000000000000", &Truncated("dimensions"));
}

#[test]
fn counts_and_texts_that_lie_are_refused() {
    use CakeWireError::{NotText, TooMany, Truncated, UnknownMessage};
    check_refused("", &Truncated("number"));
    check_refused("0000000d", &UnknownMessage(13));
    check_refused("00000006 ffffffff", &TooMany { what: "layers", found: u32::MAX as usize, max: 4096 });
    check_refused("00000006 00001000 00000000", &Truncated("layers"));
    check_refused("00000006 00000001 00000001 ff 00000000", &NotText("layer name"));
    check_refused("00000008 0000ffff 61", &Truncated("file name"));
}

#[test]
fn bytes_after_a_message_are_ignored() {
    let payload = bytes("00000007 01 ffff");
    let message = CakeMessage::LayerAssignmentAck { needs_data: true };
    assert_eq!(CakeMessage::decode(&payload, CakeVariant::Head), Ok(message));
}

#[test]
fn activations_keep_their_values_in_every_type_that_can_hold_them() {
    let values = [1.0, -2.5, 0.0, 384.0, 1.5, -0.125];
    for dtype in [CakeDType::F16, CakeDType::Bf16, CakeDType::F32] {
        let back = activation_tensor(&values, 3, dtype, |tensor| {
            assert_eq!((tensor.shape(), tensor.dtype()), (&[1, 2, 3][..], dtype));
            activation_rows(&tensor, 3)
        });
        assert_eq!(back, Ok(Ok(values.to_vec())));
    }
    assert_eq!(
        activation_tensor(&values, 3, CakeDType::I64, |_| ()),
        Err(CakeWireError::ActivationDType(CakeDType::I64))
    );
}

#[test]
fn activations_that_are_not_finite_or_have_another_shape_are_refused() {
    use CakeWireError::{ActivationDType, ActivationShape, NotFinite};
    // 70,000 is above what f16 can hold.
    assert_eq!(activation_tensor(&[70_000.0], 1, CakeDType::F16, |_| ()), Err(NotFinite(CakeDType::F16)));
    assert_eq!(activation_tensor(&[f32::NAN], 1, CakeDType::F32, |_| ()), Err(NotFinite(CakeDType::F32)));
    let nan = f32::NAN.to_le_bytes();
    let rows = |data, dtype, shape: &[u64]| activation_rows(&CakeTensor::new(data, dtype, shape.to_vec()).unwrap(), 1);
    assert_eq!(rows(&nan, CakeDType::F32, &[1, 1, 1]), Err(NotFinite(CakeDType::F32)));
    assert_eq!(rows(&nan, CakeDType::U32, &[1, 1, 1]), Err(ActivationDType(CakeDType::U32)));
    for shape in [&[1, 1][..], &[1, 1, 1, 1]] {
        assert_eq!(rows(&nan, CakeDType::F32, shape), Err(ActivationShape { hidden: 1, shape: shape.to_vec() }));
    }
    for shape in [[1, 0, 1], [1, 1, 0], [0, 1, 1]] {
        assert_eq!(rows(&[], CakeDType::F32, &shape), Err(ActivationShape { hidden: 1, shape: shape.to_vec() }));
    }
    let two = [0; 8];
    assert_eq!(rows(&two, CakeDType::F32, &[1, 1, 2]), Err(ActivationShape { hidden: 1, shape: vec![1, 1, 2] }));
}

/// What a generated message borrows from.
#[derive(Debug)]
struct Parts {
    kind: usize,
    texts: Vec<String>,
    numbers: [u64; 3],
    dims: Vec<u64>,
    dtype: CakeDType,
    data: Vec<u8>,
    is_set: bool,
}

fn parts() -> impl Strategy<Value = Parts> {
    let texts = prop::collection::vec(".{0,12}", 5..8);
    let dims = prop::collection::vec(0..4u64, 0..4);
    (0..13usize, texts, any::<[u64; 3]>(), dims, 0..8usize, any::<bool>()).prop_flat_map(
        |(kind, texts, numbers, dims, dtype, is_set)| {
            let dtype = CakeDType::ALL[dtype];
            let len = dtype.bytes() * dims.iter().product::<u64>() as usize;
            prop::collection::vec(any::<u8>(), len..=len).prop_map(move |data| Parts {
                kind,
                texts: texts.clone(),
                numbers,
                dims: dims.clone(),
                dtype,
                data,
                is_set,
            })
        },
    )
}

impl Parts {
    fn message(&self, variant: CakeVariant) -> CakeMessage<'_> {
        let [a, b, c] = self.numbers;
        let text = |index: usize| self.texts[index].as_str();
        let tensor = || CakeTensor::new(&self.data, self.dtype, self.dims.clone()).unwrap();
        let op = |index| CakeOp { layer: text(index), position: a, block: b };
        match self.kind {
            0 => CakeMessage::Hello,
            1 => CakeMessage::WorkerInfo(CakeWorkerInfo {
                version: text(0),
                dtype: text(1),
                os: text(2),
                arch: text(3),
                device: text(4),
                device_index: a,
                latency_ms: u128::from(b) << 64 | u128::from(c),
            }),
            2 => CakeMessage::SingleOp { x: tensor(), op: op(0) },
            3 => CakeMessage::Batch { x: tensor(), ops: (0..self.texts.len()).map(op).collect() },
            4 => CakeMessage::Tensor(tensor()),
            5 => CakeMessage::Goodbye,
            6 => CakeMessage::LayerAssignment {
                layers: self.texts.iter().map(String::as_str).collect(),
                model_hash: text(0),
            },
            7 => CakeMessage::LayerAssignmentAck { needs_data: self.is_set },
            8 => CakeMessage::ModelDataChunk(CakeChunk {
                file: text(0),
                offset: a,
                total_bytes: b,
                check: (variant == CakeVariant::Head)
                    .then(|| CakeChunkCheck { is_compressed: self.is_set, crc: crc32fast::hash(&self.data) }),
                data: &self.data,
            }),
            9 => CakeMessage::ModelDataDone,
            10 if variant == CakeVariant::Head => CakeMessage::ModelDataResume { file: text(0), offset: c },
            11 => CakeMessage::WorkerError { message: text(0) },
            _ => CakeMessage::WorkerReady,
        }
    }
}

proptest! {
    #[test]
    fn what_is_written_is_read_again(parts in parts(), is_older: bool) {
        let variant = VARIANTS[usize::from(is_older)];
        let message = parts.message(variant);
        let frame = message.encode(variant).unwrap();
        let payload = payload(&frame);
        prop_assert!(CakeVariant::of(payload).is_none_or(|told| told == variant));
        let decoded = CakeMessage::decode(payload, variant);
        prop_assert_eq!(decoded.as_ref(), Ok(&message));
    }

    #[test]
    fn a_cut_message_is_refused(parts in parts(), is_older: bool, cut: prop::sample::Index) {
        let variant = VARIANTS[usize::from(is_older)];
        let frame = parts.message(variant).encode(variant).unwrap();
        let payload = payload(&frame);
        prop_assert!(CakeMessage::decode(&payload[..cut.index(payload.len())], variant).is_err());
    }

    #[test]
    fn any_bytes_are_read_or_refused(payload: Vec<u8>, number in 0..14u32, is_older: bool) {
        let payload = [&number.to_be_bytes()[..], &payload].concat();
        let variant = VARIANTS[usize::from(is_older)];
        let _ = CakeVariant::of(&payload);
        if let Ok(message) = CakeMessage::decode(&payload, variant) {
            let frame = message.encode(variant).unwrap();
            let again = CakeMessage::decode(&frame[FRAME_HEADER_BYTES..], variant);
            prop_assert_eq!(again.as_ref(), Ok(&message));
        }
    }
}
