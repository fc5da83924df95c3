//! Everything of `kwaai` that reads bytes from outside, and valid bytes to begin with.

use std::fmt::Debug;

use kwaai::dht::{
    DhtDictionary, DhtEntry, DhtFindRequest, DhtFindResponse, DhtFindResult, DhtFound, DhtId, DhtRecord, DhtSender,
    DhtStoreRequest, DhtStoreResponse, DhtSubkey, KwaaiModelInfo, KwaaiServerInfo, KwaaiServerState,
    ROUTING_ADDRESSES_MAX, routing_addresses,
};
use kwaai::{
    CallId, FRAME_BYTES_MAX, KwaaiFailure, KwaaiInput, KwaaiReply, KwaaiRequest, KwaaiTensor, KwaaiWireError,
    LOCAL_FRAME_BYTES_MAX, UnaryBody, UnaryMessage, call_frame, frame_header, local_frame, local_frame_header,
    read_call, read_reply, reply_frame,
};
use types::{LayerRange, TokenId};

const CALL: CallId = CallId([7; 16]);

/// Reads the input as anything that it could be. What is read is written and read again without a change.
pub fn read_any(input: &[u8]) {
    let _ = (frame_header(input, FRAME_BYTES_MAX), local_frame_header(input, LOCAL_FRAME_BYTES_MAX));
    let _ = CallId::of_prefix(input);
    let _ = (read_call(input), read_reply(input, CALL));
    if let Ok(message) = UnaryMessage::decode(input) {
        let frame = message.encode().expect("a message that was read fits into a frame");
        let header = frame_header(&frame, FRAME_BYTES_MAX).expect("it was written").expect("it is whole");
        assert_eq!(UnaryMessage::decode(&frame[header.header_bytes..]).as_ref(), Ok(&message));
        if let UnaryBody::Call { data, .. } | UnaryBody::Response(data) = message.body {
            read_data(data);
        }
    }
    read_data(input);
}

/// What an envelope has in it, or the value of a record.
fn read_data(data: &[u8]) {
    if let Ok(request) = KwaaiRequest::decode(data) {
        assert_eq!(KwaaiRequest::decode(&request.encode()).as_ref(), Ok(&request));
        if let KwaaiInput::HiddenStates(tensor) = request.input {
            let _ = tensor.hidden_rows(2);
        }
    }
    if let Ok(reply) = KwaaiReply::decode(data) {
        assert_eq!(KwaaiReply::decode(&reply.encode()).as_ref(), Ok(&reply));
        if let KwaaiReply::Logits { tensor, .. } = reply {
            let _ = tensor.last_logits(2);
        }
    }
    if let Ok(addresses) = routing_addresses(data, b"peer") {
        assert!(addresses.len() <= ROUTING_ADDRESSES_MAX);
    }
    again(DhtStoreRequest::decode(data), |store| {
        check(store, DhtStoreRequest::decode(&store.encode()));
        store.records.iter().for_each(|record| read_value(record.value));
    });
    again(DhtStoreResponse::decode(data), |stored| check(stored, DhtStoreResponse::decode(&stored.encode())));
    again(DhtFindRequest::decode(data), |find| check(find, DhtFindRequest::decode(&find.encode())));
    again(DhtFindResponse::decode(data), |response| {
        check(response, DhtFindResponse::decode(&response.encode()));
        for result in &response.results {
            if let DhtFound::Plain { value, .. } | DhtFound::Dictionary { value, .. } = result.found {
                read_value(value);
            }
        }
    });
    read_value(data);
}

fn read_value(value: &[u8]) {
    again(KwaaiModelInfo::decode(value), |model| check(model, KwaaiModelInfo::decode(&model.encode())));
    again(KwaaiServerInfo::decode(value), |server| {
        check(server, KwaaiServerInfo::decode(&server.encode()));
        let _ = server.is_usable();
    });
    again(DhtDictionary::decode(value), |dictionary| {
        check(dictionary, DhtDictionary::decode(&dictionary.encode()));
        for entry in &dictionary.entries {
            let _ = KwaaiServerInfo::decode(entry.value);
        }
    });
}

fn again<T>(read: Result<T, KwaaiWireError>, then: impl FnOnce(&T)) {
    if let Ok(value) = read {
        then(&value);
    }
}

fn check<T: Debug + PartialEq>(value: &T, again: Result<T, KwaaiWireError>) {
    assert_eq!(again.as_ref(), Ok(value));
}

/// Each message, and each record.
pub fn seeds() -> Vec<Vec<u8>> {
    let tensor = || KwaaiTensor::of_rows(&[1.0, -2.0, 0.5, 4.0], 2).expect("the values are finite");
    let tokens = KwaaiInput::Tokens(vec![TokenId(1), TokenId(42), TokenId(999)]);
    let requests = [tokens, KwaaiInput::HiddenStates(tensor())];
    let requests = requests.map(|input| KwaaiRequest { session: 5, position: 3, input });
    let replies = [
        KwaaiReply::HiddenStates { session: 5, tensor: tensor() },
        KwaaiReply::Logits { session: 5, tensor: tensor() },
        KwaaiReply::Failed(KwaaiFailure::not_first(16)),
        KwaaiReply::Failed(KwaaiFailure::AtCapacity),
    ];
    let calls = requests.iter().map(|request| call_frame(CALL, b"peer", request));
    let frames: Vec<_> = calls.chain(replies.iter().map(|reply| reply_frame(CALL, reply))).collect();
    let frames = frames.into_iter().map(|frame| frame.expect("it is small"));
    // As frames, and without the one byte of their header.
    let mut seeds: Vec<Vec<u8>> = frames.flat_map(|frame| [frame[1..].to_vec(), frame]).collect();
    seeds.extend(requests.iter().map(KwaaiRequest::encode));
    seeds.extend(replies.iter().map(KwaaiReply::encode));
    seeds.push(local_frame(&requests[0].encode()).expect("it is small"));
    // A request in the order of its fields, with an integer for each byte of data.
    seeds.push([&b"\x95\x05\x00\xa9token_ids\x91\x01\x94"[..], &[0xcc, 0xe7, 3, 0, 0]].concat());
    seeds.extend(discovery_seeds());
    seeds
}

fn discovery_seeds() -> Vec<Vec<u8>> {
    let server = KwaaiServerInfo {
        state: KwaaiServerState::Ready,
        throughput: 12.5,
        blocks: LayerRange::new(0, 8).expect("it is not empty"),
        public_name: Some("name"),
        version: Some("kwaai-0.4.0"),
        dtype: Some("float16"),
        using_relay: true,
        cache_tokens_left: Some(100_000),
        peer: Some("12D3KooW"),
        lease_v1: true,
    };
    let server = server.encode();
    let expires_at = 1.8e9;
    let entry = DhtEntry { subkey: "12D3KooW", value: &server, expires_at };
    let dictionary = DhtDictionary { entries_max: None, latest_expiration: expires_at, entries: vec![entry, entry] };
    let dictionary = dictionary.encode();
    let key = DhtId::of_key("model.0");
    let sender = DhtSender { time: Some(expires_at), node: Some(DhtId::of_peer(b"peer")) };
    let record = |subkey, value| DhtRecord { key, subkey, value, expires_at, in_cache: false };
    let records = vec![
        record(DhtSubkey::Entry("12D3KooW"), &server[..]),
        record(DhtSubkey::Whole, &dictionary),
        record(DhtSubkey::Plain, &[0xc0]),
    ];
    let found = [
        DhtFound::Nothing,
        DhtFound::Plain { value: &server, expires_at },
        DhtFound::Dictionary { value: &dictionary, expires_at },
    ];
    let results = found.map(|found| DhtFindResult { found, nearest: vec![(key, b"peer")] });
    vec![
        DhtStoreRequest { sender, records }.encode(),
        DhtStoreResponse { sender, accepted: vec![true, false] }.encode(),
        DhtFindRequest { sender, keys: vec![key, key] }.encode(),
        DhtFindResponse { sender, results: results.to_vec() }.encode(),
        KwaaiModelInfo { repository: "owner/Model-1.5", blocks: 32 }.encode(),
        server,
        dictionary,
    ]
}
