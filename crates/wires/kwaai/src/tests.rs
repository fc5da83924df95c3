//! Golden bytes, round trips of generated values, and bytes that are wrong.

use std::borrow::Cow;

use half::f16;
use proptest::prelude::*;
use types::TokenId;

use super::*;
use crate::tensor::FRAME_OVERHEAD_BYTES_MAX;

const CALL: CallId = CallId([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);
const ENVELOPE: &str = "0a10 000102030405060708090a0b0c0d0e0f";
const PROTOCOL: &str = "1216 2f6b776161692f696e666572656e63652f312e302e30";
/// Up to the data.
const REQUEST: &str = "85aa73657373696f6e5f696405a77365715f706f7300ac7061796c6f61645f74797065a9746f6b656e5f6964\
                       73a573686170659103a464617461";
const FAILURE: &str = "85aa73657373696f6e5f696400ad726573706f6e73655f74797065ad68696464656e5f737461746573a57368\
                       61706590a46461746190a56572726f72a4626f6f6d";

/// Bytes written in hexadecimal; spaces do not count.
pub(crate) fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u32> = hex.chars().filter_map(|digit| digit.to_digit(16)).collect();
    digits.chunks_exact(2).map(|pair| (pair[0] * 16 + pair[1]) as u8).collect()
}

/// The payload of a frame.
fn payload(frame: &[u8]) -> Vec<u8> {
    let header = frame_header(frame, FRAME_BYTES_MAX).unwrap().unwrap();
    assert_eq!(header.header_bytes + header.payload_bytes, frame.len());
    frame[header.header_bytes..].to_vec()
}

fn tokens(ids: &[u32]) -> KwaaiRequest<'static> {
    KwaaiRequest { session: 5, position: 0, input: KwaaiInput::Tokens(ids.iter().copied().map(TokenId).collect()) }
}

#[test]
fn the_reference_request_is_read_in_both_forms_and_written_with_a_binary() {
    let integers = bytes(&format!("{REQUEST} 9c010000002a000000cce7030000"));
    assert_eq!(integers.len(), 72);
    assert_eq!(KwaaiRequest::decode(&integers), Ok(tokens(&[1, 42, 999])));
    let bin = bytes(&format!("{REQUEST} c40c 01000000 2a000000 e7030000"));
    assert_eq!(KwaaiRequest::decode(&bin), Ok(tokens(&[1, 42, 999])));
    assert_eq!(tokens(&[1, 42, 999]).encode(), bin);
}

#[test]
fn the_reference_call_is_read_and_written() {
    let data = bytes(&format!("{REQUEST} 9c010000002a000000cce7030000"));
    let frame = [bytes(&format!("78 {ENVELOPE} 1a64 0a00 {PROTOCOL} 1a48")), data.clone()].concat();
    assert_eq!(frame.len(), 121);
    let body = UnaryBody::Call { peer: &[], protocol: INFERENCE_PROTOCOL, data: &data };
    let message = UnaryMessage { call: CALL, body };
    assert_eq!(message.encode().as_ref(), Ok(&frame));
    let payload = payload(&frame);
    assert_eq!(UnaryMessage::decode(&payload), Ok(message));
    assert_eq!(read_call(&payload), Ok((CALL, Ok(tokens(&[1, 42, 999])))));
    // One element of the array takes two bytes; the header of the binary takes one more.
    let ours = bytes(&format!("78 {ENVELOPE} 1a64 0a00 {PROTOCOL} 1a48 {REQUEST} c40c 01000000 2a000000 e7030000"));
    assert_eq!(call_frame(CALL, &[], &tokens(&[1, 42, 999])), Ok(ours));
}

#[test]
fn the_reference_failure_is_read_and_written() {
    let frame = bytes(&format!("57 {ENVELOPE} 2243 0a41 {FAILURE}"));
    let reply = KwaaiReply::Failed(KwaaiFailure::Refused("boom".to_owned()));
    assert_eq!(reply_frame(CALL, &reply).as_ref(), Ok(&frame));
    assert_eq!(read_reply(&payload(&frame), CALL), Ok(reply));
}

#[test]
fn a_reply_is_read_by_the_caller_whose_call_it_answers() {
    let frame = reply_frame(CALL, &KwaaiReply::Failed(KwaaiFailure::AtCapacity)).unwrap();
    assert_eq!(frame, bytes(&format!("26 {ENVELOPE} 2212 1210 6e6f6465206174206361706163697479")));
    let payload = payload(&frame);
    assert_eq!(read_reply(&payload, CALL), Ok(KwaaiReply::Failed(KwaaiFailure::AtCapacity)));
    assert_eq!(read_reply(&payload, CallId([0; 16])), Err(KwaaiWireError::OtherCall));
    assert_eq!(read_call(&payload), Err(KwaaiWireError::Unexpected));
    let call = call_frame(CALL, b"peer", &tokens(&[1])).unwrap();
    assert_eq!(read_reply(&self::payload(&call), CALL), Err(KwaaiWireError::Unexpected));
}

fn check_envelope_refused(hex: &str, error: &KwaaiWireError) {
    assert_eq!(UnaryMessage::decode(&bytes(hex)).as_ref(), Err(error), "{hex}");
}

#[test]
fn envelopes_need_all_their_fields() {
    use KwaaiWireError::{Length, Missing, OutOfRange, Truncated, Type, UnknownBody, Varint};
    check_envelope_refused("", &Missing("call id"));
    check_envelope_refused(ENVELOPE, &Missing("call or reply"));
    check_envelope_refused("2200", &Missing("response or error"));
    check_envelope_refused("1a04 0a00 1a00", &Missing("protocol"));
    check_envelope_refused("1a04 1200 1a00", &Missing("peer"));
    check_envelope_refused("1a04 0a00 1200", &Missing("data"));
    check_envelope_refused("220a 0a00", &Truncated("envelope"));
    check_envelope_refused("22ffffffffffffffff7f", &Truncated("envelope"));
    check_envelope_refused("2202 0a05", &Truncated("reply"));
    check_envelope_refused("0a0f 000102030405060708090a0b0c0d0e", &Length { what: "call id", found: 15, expected: 16 });
    check_envelope_refused("0801", &Type("call id"));
    check_envelope_refused("0b", &Type("envelope"));
    check_envelope_refused("00", &OutOfRange("field number"));
    check_envelope_refused("ffffffffffffffffff02", &Varint);
    check_envelope_refused("2a00", &UnknownBody(5));
    check_envelope_refused("2203 1201ff", &KwaaiWireError::NotText("error"));
}

#[test]
fn unknown_fields_of_envelopes_are_ignored() {
    let unknown = "3801 3d00000000 39 0000000000000000 4203aabbcc";
    let payload = bytes(&format!("{unknown} {ENVELOPE} 2202 0a00 {unknown}"));
    assert_eq!(UnaryMessage::decode(&payload), Ok(UnaryMessage { call: CALL, body: UnaryBody::Response(&[]) }));
}

#[test]
fn a_header_is_refused_before_its_payload_is_read() {
    let header = |hex| frame_header(&bytes(hex), usize::MAX);
    assert_eq!(header(""), Ok(None));
    assert_eq!(header("80"), Ok(None));
    assert_eq!(header("78ff"), Ok(Some(FrameHeader { header_bytes: 1, payload_bytes: 120 })));
    assert_eq!(header("80808005"), Ok(Some(FrameHeader { header_bytes: 4, payload_bytes: FRAME_BYTES_MAX })));
    let (bytes_found, max) = (FRAME_BYTES_MAX as u64 + 1, FRAME_BYTES_MAX);
    assert_eq!(header("81808005"), Err(KwaaiWireError::FrameTooLong { bytes: bytes_found, max }));
    assert_eq!(header("ffffffffffffffffff01"), Err(KwaaiWireError::FrameTooLong { bytes: u64::MAX, max }));
    assert_eq!(header("ffffffffffffffffff02"), Err(KwaaiWireError::Varint));
    assert_eq!(header("ffffffffffffffffffff01"), Err(KwaaiWireError::Varint));
    assert_eq!(frame_header(&[5], 4), Err(KwaaiWireError::FrameTooLong { bytes: 5, max: 4 }));
    let long = vec![0; FRAME_BYTES_MAX];
    let message = UnaryMessage { call: CALL, body: UnaryBody::Response(&long) };
    assert!(matches!(message.encode(), Err(KwaaiWireError::FrameTooLong { .. })));
}

#[test]
fn a_frame_on_the_same_host_has_its_length_in_four_bytes() {
    assert_eq!(local_frame(&[0xaa, 0xbb]), Ok(bytes("02000000 aabb")));
    let header = FrameHeader { header_bytes: 4, payload_bytes: 2 };
    assert_eq!(local_frame_header(&bytes("02000000 aabb"), 9), Ok(Some(header)));
    assert_eq!(local_frame_header(&bytes("020000"), 9), Ok(None));
    assert_eq!(local_frame_header(&bytes("0a000000"), 9), Err(KwaaiWireError::FrameTooLong { bytes: 10, max: 9 }));
    let too_long = KwaaiWireError::FrameTooLong { bytes: u32::MAX.into(), max: LOCAL_FRAME_BYTES_MAX };
    assert_eq!(local_frame_header(&[0xff; 4], usize::MAX), Err(too_long));
}

#[test]
fn the_call_of_a_frame_is_known_from_its_first_bytes() {
    let frame = call_frame(CALL, b"peer", &tokens(&[1])).unwrap();
    assert_eq!(CallId::of_prefix(&payload(&frame)[..CallId::PREFIX_BYTES]), Some(CALL));
    for refused in ["", "0a10", "0a0f 000102030405060708090a0b0c0d0e0f", "1210 000102030405060708090a0b0c0d0e0f"] {
        assert_eq!(CallId::of_prefix(&bytes(refused)), None, "{refused}");
    }
}

/// `a5` and such before ASCII: a text of MessagePack.
fn text(text: &str) -> Vec<u8> {
    [&[0xa0 + text.len() as u8], text.as_bytes()].concat()
}

/// A map of MessagePack from names to bytes in hexadecimal.
fn map(fields: &[(&str, &str)]) -> Vec<u8> {
    let entries = fields.iter().flat_map(|(name, value)| [text(name), bytes(value)].concat());
    [0x80 + fields.len() as u8].into_iter().chain(entries).collect()
}

#[test]
fn payloads_may_have_fields_in_any_order_unknown_fields_and_no_error() {
    let hidden = "ad 68696464656e5f737461746573";
    let fields = [
        ("later", "82 01 93 c0 c3 cb0000000000000000 d90161 c70301aabbcc"),
        ("data", "c404 003c 00c0"),
        ("shape", "93 01 ce00000001 cd0002"),
        ("response_type", hidden),
        ("session_id", "cf ffffffffffffffff"),
    ];
    let tensor = KwaaiTensor::of_rows(&[1.0, -2.0], 2).unwrap();
    let reply = KwaaiReply::HiddenStates { session: u64::MAX, tensor };
    assert_eq!(KwaaiReply::decode(&map(&fields)).as_ref(), Ok(&reply));
    let with_nil = [&fields[..], &[("error", "c0")]].concat();
    assert_eq!(KwaaiReply::decode(&map(&with_nil)).as_ref(), Ok(&reply));
    let positional = format!("cf ffffffffffffffff {hidden} 93 01 01 02 94 00 3c 00 ccc0");
    for (head, tail) in [("94", ""), ("95", "c0"), ("96", "c0 a16c"), ("94", "ffff")] {
        let payload = bytes(&format!("{head} {positional} {tail}"));
        assert_eq!(KwaaiReply::decode(&payload).as_ref(), Ok(&reply), "{head} {tail}");
    }
}

fn check_request_refused(hex: &str, error: &KwaaiWireError) {
    assert_eq!(KwaaiRequest::decode(&bytes(hex)).as_ref(), Err(error), "{hex}");
}

#[test]
fn requests_that_lie_are_refused() {
    use KwaaiWireError::{
        Missing, NotText, OutOfRange, Repeated, TensorBytes, TokenBytes, TooMany, Truncated, Type, UnknownKind,
    };
    let (ids, hidden) = ("a9 746f6b656e5f696473", "ad 68696464656e5f737461746573");
    check_request_refused("", &Truncated("request"));
    check_request_refused("c0", &Type("request"));
    check_request_refused("80", &Missing("session id"));
    check_request_refused("dfffffffff", &Truncated("request"));
    check_request_refused("ddffffffff", &Truncated("request"));
    check_request_refused("82 aa73657373696f6e5f6964 01 aa73657373696f6e5f6964 01", &Repeated("session_id"));
    check_request_refused("81 aa73657373696f6e5f6964 ff", &OutOfRange("session id"));
    check_request_refused("94 05 00 a3746f6b 90", &Missing("data"));
    check_request_refused("95 05 00 a3746f6b 90 90", &UnknownKind("payload type"));
    check_request_refused("95 05 00 a2ff00 90 90", &NotText("payload type"));
    check_request_refused("95 05 cf0000000100000000 a0 90 90", &OutOfRange("position"));
    check_request_refused(&format!("95 05 00 {ids} 91 03 ddffffffff"), &Truncated("data"));
    check_request_refused(&format!("95 05 00 {ids} 91 03 c6ffffffff"), &Truncated("data"));
    check_request_refused(&format!("95 05 00 {ids} 91 03 91 cd0100"), &OutOfRange("data"));
    check_request_refused(&format!("95 05 00 {ids} 91 03 91 a0"), &Type("data"));
    check_request_refused(&format!("95 05 00 {ids} 91 03 a0"), &Type("data"));
    check_request_refused(&format!("95 05 00 {ids} 90 90"), &TokenBytes { bytes: 0 });
    check_request_refused(&format!("95 05 00 {ids} 90 c403 000000"), &TokenBytes { bytes: 3 });
    let nine = TooMany { what: "dimensions", found: 9, max: 8 };
    check_request_refused(&format!("95 05 00 {hidden} 99 010101010101010101 90"), &nine);
    let odd = TensorBytes { shape: vec![1, 1, 2], bytes: 3 };
    check_request_refused(&format!("95 05 00 {hidden} 93 010102 c403 000000"), &odd);
    // The product of the dimensions overflows, to zero.
    let big = format!("95 05 00 {hidden} 93 ce80000000 ce80000000 04 90");
    check_request_refused(&big, &TensorBytes { shape: vec![1 << 31, 1 << 31, 4], bytes: 0 });
}

#[test]
fn what_is_skipped_needs_no_stack() {
    let nested = [&bytes("81 a178")[..], &[0x91; 1 << 20], &[0xc0]].concat();
    assert_eq!(KwaaiRequest::decode(&nested), Err(KwaaiWireError::Missing("session id")));
    assert_eq!(KwaaiRequest::decode(&nested[..1 << 20]), Err(KwaaiWireError::Truncated("request")));
}

#[test]
fn rows_become_f16_and_come_back() {
    let values = [1.0, -2.5, 0.0, 384.0, 1.5, -0.125];
    let tensor = KwaaiTensor::of_rows(&values, 3).unwrap();
    assert_eq!(tensor.shape(), [1, 2, 3]);
    assert_eq!(tensor.hidden_rows(3).as_deref(), Ok(&values[..]));
    assert_eq!(tensor.last_logits(3).as_deref(), Ok(&values[3..]));
    let hidden = KwaaiWireError::HiddenShape { hidden: 2, shape: vec![1, 2, 3] };
    assert_eq!(tensor.hidden_rows(2), Err(hidden));
    assert_eq!(tensor.last_logits(2), Err(KwaaiWireError::LogitShape { vocab: 2, shape: vec![1, 2, 3] }));
    let uneven = KwaaiWireError::TensorBytes { shape: vec![1, 1, 4], bytes: 12 };
    assert_eq!(KwaaiTensor::of_rows(&values, 4), Err(uneven));
    for value in [70_000.0, f32::NAN, f32::NEG_INFINITY] {
        assert_eq!(KwaaiTensor::of_rows(&[value], 1), Err(KwaaiWireError::NotFinite));
    }
}

#[test]
fn tensors_of_other_ranks_or_without_rows_are_refused() {
    let tensor = |data: &[u8], shape: &[u32]| KwaaiTensor::new(Cow::Owned(data.to_vec()), shape.to_vec()).unwrap();
    let one = f16::ONE.to_le_bytes();
    assert_eq!(tensor(&one, &[1]).last_logits(1), Ok(vec![1.0]));
    for shape in [&[1][..], &[1, 1], &[1, 1, 1, 1]] {
        let refused = KwaaiWireError::HiddenShape { hidden: 1, shape: shape.to_vec() };
        assert_eq!(tensor(&one, shape).hidden_rows(1), Err(refused));
    }
    for shape in [[1, 0, 1], [0, 1, 1]] {
        let refused = KwaaiWireError::HiddenShape { hidden: 1, shape: shape.to_vec() };
        assert_eq!(tensor(&[], &shape).hidden_rows(1), Err(refused));
        let refused = KwaaiWireError::LogitShape { vocab: 1, shape: shape.to_vec() };
        assert_eq!(tensor(&[], &shape).last_logits(1), Err(refused));
    }
    for value in [f16::NAN, f16::INFINITY] {
        assert_eq!(tensor(&value.to_le_bytes(), &[1, 1, 1]).hidden_rows(1), Err(KwaaiWireError::NotFinite));
        assert_eq!(tensor(&value.to_le_bytes(), &[1]).last_logits(1), Err(KwaaiWireError::NotFinite));
    }
}

#[test]
fn as_many_rows_as_said_fit_into_a_frame() {
    for (hidden, rows) in [(4096, 1279), (5120, 1023), (8192, 639), (16_384, 319)] {
        assert_eq!(rows_per_frame(hidden, DataForm::Bin), rows);
        assert_eq!(rows_per_frame(hidden, DataForm::Integers), rows / 2);
    }
    assert_eq!(rows_per_frame(0, DataForm::Bin), 0);
    assert_eq!(rows_per_frame(usize::MAX, DataForm::Integers), 0);
    // The longest numbers, a long peer id, and the most rows.
    let rows = rows_per_frame(4097, DataForm::Bin);
    let tensor = KwaaiTensor::of_rows(&vec![1.0; rows * 4097], 4097).unwrap();
    let request = KwaaiRequest { session: u64::MAX, position: u32::MAX, input: KwaaiInput::HiddenStates(tensor) };
    let frame = call_frame(CALL, &[0xff; 127], &request).unwrap();
    assert!(frame.len() - rows * 4097 * 2 < FRAME_OVERHEAD_BYTES_MAX);
}

fn check_failure(text: &str, in_error: KwaaiFailure, in_response: KwaaiFailure) {
    for (read, failure) in [(KwaaiFailure::of_error(text), in_error), (KwaaiFailure::of_response(text), in_response)] {
        assert_eq!(read, failure);
        assert_eq!(failure.to_string(), text);
    }
}

#[test]
fn the_texts_of_failures_become_variants() {
    use KwaaiFailure::{AtCapacity, NoSuchBlock, Panicked, Refused, TimedOut, Transport, WarmingUp};
    let both = |text, failure: KwaaiFailure| check_failure(text, failure.clone(), failure);
    both("node warming up: 3 of 8", WarmingUp(": 3 of 8".to_owned()));
    both("node at capacity", AtCapacity);
    both("handler timed out", TimedOut);
    both("forward pass panicked: index", Panicked(": index".to_owned()));
    let not_first = KwaaiFailure::not_first(16);
    both(&not_first.to_string(), NoSuchBlock(not_first.to_string()));
    check_failure("stream reset", Transport("stream reset".to_owned()), Refused("stream reset".to_owned()));
    let long = "ä".repeat(FAILURE_TEXT_BYTES_MAX) + "x";
    assert_eq!(KwaaiFailure::of_error(&long), Transport("ä".repeat(FAILURE_TEXT_BYTES_MAX / 2)));
}

#[test]
fn only_a_call_that_has_not_run_is_sent_again() {
    for text in ["node warming up", "node at capacity"] {
        assert!(KwaaiFailure::of_response(text).is_retryable(), "{text}");
    }
    for text in ["handler timed out", "forward pass panicked", "stream reset", "early eof", "start_block 4", ""] {
        assert!(!KwaaiFailure::of_error(text).is_retryable(), "{text}");
        assert!(!KwaaiFailure::of_response(text).is_retryable(), "{text}");
    }
}

fn tensor() -> impl Strategy<Value = KwaaiTensor<'static>> {
    prop::collection::vec(0..4_u32, 0..4).prop_flat_map(|shape| {
        let len = 2 * shape.iter().product::<u32>() as usize;
        let data = prop::collection::vec(any::<u8>(), len..=len);
        data.prop_map(move |data| KwaaiTensor::new(Cow::Owned(data), shape.clone()).unwrap())
    })
}

fn request() -> impl Strategy<Value = KwaaiRequest<'static>> {
    let tokens = prop::collection::vec(any::<u32>().prop_map(TokenId), 1..300);
    let input = prop_oneof![tokens.prop_map(KwaaiInput::Tokens), tensor().prop_map(KwaaiInput::HiddenStates)];
    (any::<u64>(), any::<u32>(), input).prop_map(|(session, position, input)| KwaaiRequest { session, position, input })
}

fn reply() -> impl Strategy<Value = KwaaiReply<'static>> {
    prop_oneof![
        (any::<u64>(), tensor()).prop_map(|(session, tensor)| KwaaiReply::HiddenStates { session, tensor }),
        (any::<u64>(), tensor()).prop_map(|(session, tensor)| KwaaiReply::Logits { session, tensor }),
        ".{0,40}".prop_map(|text| KwaaiReply::Failed(KwaaiFailure::of_response(&text))),
        ".{0,40}".prop_map(|text| KwaaiReply::Failed(KwaaiFailure::of_error(&text))),
    ]
}

proptest! {
    #[test]
    fn a_call_is_written_and_read(request in request(), id: [u8; 16], peer in prop::collection::vec(any::<u8>(), 0..200)) {
        let frame = call_frame(CallId(id), &peer, &request).unwrap();
        assert_eq!(read_call(&payload(&frame)), Ok((CallId(id), Ok(request))));
    }

    #[test]
    fn a_reply_is_written_and_read(reply in reply(), id: [u8; 16]) {
        let frame = reply_frame(CallId(id), &reply).unwrap();
        let payload = payload(&frame);
        assert_eq!(read_reply(&payload, CallId(id)), Ok(reply));
    }

    #[test]
    fn a_cut_call_is_refused(request in request(), cut: prop::sample::Index) {
        let payload = payload(&call_frame(CALL, b"peer", &request).unwrap());
        assert!(read_call(&payload[..cut.index(payload.len())]).is_err());
        let data = request.encode();
        assert!(KwaaiRequest::decode(&data[..cut.index(data.len())]).is_err());
    }

    #[test]
    fn a_cut_reply_is_refused(reply in reply(), cut: prop::sample::Index) {
        let payload = payload(&reply_frame(CALL, &reply).unwrap());
        assert!(read_reply(&payload[..cut.index(payload.len())], CALL).is_err());
        let data = reply.encode();
        assert!(KwaaiReply::decode(&data[..cut.index(data.len())]).is_err());
    }

    #[test]
    fn data_in_integers_is_read_as_data_in_a_binary(ids in prop::collection::vec(any::<u32>(), 1..40)) {
        let data: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let mut integers = bytes(REQUEST);
        rmp::encode::write_array_len(&mut integers, data.len() as u32).unwrap();
        data.iter().for_each(|&byte| { rmp::encode::write_uint(&mut integers, byte.into()).unwrap(); });
        assert_eq!(KwaaiRequest::decode(&integers), Ok(tokens(&ids)));
    }
}
