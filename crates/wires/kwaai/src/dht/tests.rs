//! Golden bytes, round trips of generated messages, and bytes that are wrong.

use proptest::prelude::*;
use types::LayerRange;

use super::*;
use crate::tests::bytes;

#[test]
fn keys_are_hashes_of_packed_names() {
    for (key, hash) in [
        (MODELS_KEY, "0a63ed21831f3f7d24f07949cea69a94476b4faf"),
        (NODES_KEY, "531c2cf657a8e75384a436a0dcf6d170c8040d8a"),
        ("Llama-3-1-8B-Instruct.0", "821ccf962f07b3a728a8b3b8e1c6a5391fb6db37"),
    ] {
        assert_eq!(DhtId::of_key(key).0[..], bytes(hash), "{key}");
    }
    // SHA-1 of "abc", as its standard has it.
    assert_eq!(DhtId::of_peer(b"abc").0[..], bytes("a9993e364706816aba3e25717850c26c9cd0d89d"));
    let prefix = model_prefix("unsloth/Llama-3.1-8B-Instruct");
    assert_eq!(block_key(&prefix, 0), "Llama-3-1-8B-Instruct.0");
    assert_eq!(model_prefix("plain"), "plain");
}

fn server() -> KwaaiServerInfo<'static> {
    KwaaiServerInfo {
        state: KwaaiServerState::Ready,
        throughput: 1.0,
        blocks: LayerRange::new(0, 200).unwrap(),
        public_name: None,
        version: Some("kwaai-0.4.0"),
        dtype: Some("float16"),
        using_relay: false,
        cache_tokens_left: Some(100_000),
        peer: Some("Qm"),
        lease_v1: true,
    }
}

#[test]
fn a_server_is_an_extension_of_its_state_throughput_and_fields() {
    let fields: [(&str, &str); 11] = [
        ("start_block", "00"),
        ("end_block", "ccc8"),
        ("public_name", "c0"),
        ("version", "ab 6b776161692d302e342e30"),
        ("torch_dtype", "a7 666c6f61743136"),
        ("using_relay", "c2"),
        ("cache_tokens_left", "ce000186a0"),
        ("adapters", "90"),
        ("next_pings", "80"),
        ("peer_id", "a2 516d"),
        ("lease_v1", "c3"),
    ];
    let fields =
        fields.iter().flat_map(|(name, value)| [&[0xa0 + name.len() as u8], name.as_bytes(), &bytes(value)].concat());
    let data: Vec<u8> = bytes("93 02 cb3ff0000000000000 8b").into_iter().chain(fields).collect();
    let value = [&[0xc7, data.len() as u8, 0x40], &data[..]].concat();
    assert_eq!(server().encode(), value);
    assert_eq!(KwaaiServerInfo::decode(&value), Ok(server()));
}

#[test]
fn other_forms_of_a_server_are_read() {
    // -1, an integer as throughput, the range and a field that is not known.
    let data = "93 ff 05 83 ab73746172745f626c6f636b 04 a9656e645f626c6f636b 08 a3766b70 81a16d05";
    let length = bytes(data).len();
    let value = bytes(&format!("c7 {length:02x} 40 {data}"));
    let offline = KwaaiServerInfo::decode(&value).map(|info| {
        assert!(!info.is_usable());
        (info.state, info.throughput, info.blocks.start(), info.blocks.end(), info.peer)
    });
    assert_eq!(offline, Ok((KwaaiServerState::Offline, 5.0, 4, 8, None)));
}

fn check_server_refused(data: &str, error: &KwaaiWireError) {
    let value = bytes(&format!("c7 {:02x} 40 {data}", bytes(data).len()));
    assert_eq!(KwaaiServerInfo::decode(&value).as_ref(), Err(error), "{data}");
}

#[test]
fn servers_that_lie_are_refused() {
    use KwaaiWireError::{Count, Missing, OutOfRange, Truncated, Type};
    let range = |range: &str| {
        let [start, end] = [&range[..2], &range[2..]];
        format!("93 02 00 82 ab73746172745f626c6f636b {start} a9656e645f626c6f636b {end}")
    };
    check_server_refused(&range("0404"), &OutOfRange("blocks"));
    check_server_refused(&range("0804"), &OutOfRange("blocks"));
    check_server_refused(&range("ff04"), &OutOfRange("blocks"));
    check_server_refused("93 02 00 80", &Missing("blocks"));
    check_server_refused("92 02 00", &Count { what: "parts of a server", found: 2, expected: 3 });
    check_server_refused("93 02 cb7ff8000000000000 80", &OutOfRange("throughput"));
    check_server_refused("93 02 cb7ff0000000000000 80", &OutOfRange("throughput"));
    check_server_refused("93 02 00", &Truncated("server"));
    check_server_refused("93 a0 00 80", &Type("state"));
    assert_eq!(KwaaiServerInfo::decode(&bytes("c7 01 41 90")), Err(Type("server")));
    assert_eq!(KwaaiServerInfo::decode(&bytes("c9 ffffffff 40 90")), Err(Truncated("server")));
    assert_eq!(KwaaiServerInfo::decode(&bytes("90")), Err(Type("server")));
}

#[test]
fn a_server_is_usable_when_it_is_ready_and_new_enough() {
    let usable = |state, version| KwaaiServerInfo { state, version, ..server() }.is_usable();
    let ready = |version| usable(KwaaiServerState::Ready, Some(version));
    assert!(["kwaai-0.3.15", "kwaai-0.4.0", "kwaai-1.0.0"].into_iter().all(ready));
    let old_or_unreadable = ["kwaai-0.3.14", "0.3.15", "kwaai-", "kwaai-1.0", "kwaai-1.0.0.0", "kwaai-1.0.x", ""];
    assert!(!old_or_unreadable.into_iter().any(ready));
    assert!(!usable(KwaaiServerState::Ready, None));
    for state in [KwaaiServerState::Joining, KwaaiServerState::Offline, KwaaiServerState::Other(1)] {
        assert!(!usable(state, Some("kwaai-1.0.0")));
    }
}

#[test]
fn a_dictionary_is_an_extension_whose_subkeys_are_texts() {
    let value = bytes("c7 1e 50 93 c0 cb4000000000000000 91 93 a161 c40102 cb3ff0000000000000");
    let value = [&value[..1], &[(value.len() - 3) as u8], &value[2..]].concat();
    let entry = DhtEntry { subkey: "a", value: &[2], expires_at: 1.0 };
    let dictionary = DhtDictionary { entries_max: None, latest_expiration: 2.0, entries: vec![entry] };
    assert_eq!(dictionary.encode(), value);
    assert_eq!(DhtDictionary::decode(&value), Ok(dictionary));
}

#[test]
fn one_bad_entry_does_not_hide_the_others() {
    // A subkey in binary, an entry that is nil, one of two parts, one whose expiration is not a number, a good one.
    let entries = "93 c40161 c400 01   c0   92 a161 c400   93 a162 c400 cb7ff8000000000000   93 a163 c400 01";
    let data = format!("93 05 01 95 {entries}");
    let value = bytes(&format!("c7 {:02x} 50 {data}", bytes(&data).len()));
    let entry = DhtEntry { subkey: "c", value: &[], expires_at: 1.0 };
    let dictionary = DhtDictionary { entries_max: Some(5), latest_expiration: 1.0, entries: vec![entry] };
    assert_eq!(DhtDictionary::decode(&value), Ok(dictionary));
}

#[test]
fn a_model_is_a_map() {
    let value = bytes("82 aa7265706f7369746f7279 a3612f62 aa6e756d5f626c6f636b73 20");
    let model = KwaaiModelInfo { repository: "a/b", blocks: 32 };
    assert_eq!(model.encode(), value);
    assert_eq!(KwaaiModelInfo::decode(&value), Ok(model));
    assert_eq!(KwaaiModelInfo::decode(&[0x80]), Err(KwaaiWireError::Missing("repository")));
}

#[test]
fn only_a_later_expiration_replaces_a_record() {
    assert!(is_fresher(2.0, None, 1.0));
    assert!(is_fresher(3.0, Some(2.0), 1.0));
    for (expires_at, current) in
        [(1.0, None), (0.5, None), (2.0, Some(2.0)), (2.0, Some(3.0)), (f64::NAN, None), (f64::INFINITY, None)]
    {
        assert!(!is_fresher(expires_at, current, 1.0), "{expires_at} {current:?}");
    }
}

const KEY: DhtId = DhtId([0x11; DHT_ID_BYTES]);
const KEY_HEX: &str = "14 1111111111111111111111111111111111111111";

#[test]
fn messages_have_the_fields_of_hivemind() {
    let sender = DhtSender { time: Some(1.0), node: Some(KEY) };
    let (auth, node) = ("0a09 19000000000000f03f", format!("16 0a{KEY_HEX}"));
    let find = DhtFindRequest { sender, keys: vec![KEY] };
    assert_eq!(find.encode(), bytes(&format!("{auth} 12{KEY_HEX} 1a{node}")));
    let record = |subkey, expires_at| DhtRecord { key: KEY, subkey, value: &[7], expires_at, in_cache: false };
    let records =
        vec![record(DhtSubkey::Entry("a"), 1.0), record(DhtSubkey::Plain, 2.0), record(DhtSubkey::Whole, 1.0)];
    let store = DhtStoreRequest { sender, records };
    let keys = format!("12{KEY_HEX} 12{KEY_HEX} 12{KEY_HEX}");
    let (one, two) = ("000000000000f03f", "0000000000000040");
    let rest = format!("1a02a161 1a01c0 1a00 220107 220107 220107 2a18 {one}{two}{one} 3203 000000 3a{node}");
    assert_eq!(store.encode(), bytes(&format!("{auth} {keys} {rest}")));
    let stored = DhtStoreResponse { sender, accepted: vec![true, false] };
    assert_eq!(stored.encode(), bytes(&format!("{auth} 12020100 1a{node}")));
    let found = DhtFound::Dictionary { value: &[7], expires_at: 1.0 };
    let results = vec![
        DhtFindResult { found, nearest: vec![(KEY, b"p")] },
        DhtFindResult { found: DhtFound::Nothing, nearest: Vec::new() },
    ];
    let response = DhtFindResponse { sender, results };
    let result = format!("0802 120107 19{one} 22{KEY_HEX} 2a0170");
    let length = bytes(&result).len();
    assert_eq!(response.encode(), bytes(&format!("{auth} 12 {length:02x} {result} 1200 1a{node}")));
}

#[test]
fn repeated_numbers_are_read_packed_or_one_by_one() {
    let store = |numbers: &str| {
        let request = bytes(&format!("12{KEY_HEX} 12{KEY_HEX} 1a01c0 1a01c0 2200 2200 {numbers}"));
        DhtStoreRequest::decode(&request)
            .map(|store| store.records.iter().map(|record| (record.expires_at, record.in_cache)).collect::<Vec<_>>())
    };
    let (one, two) = ("000000000000f03f", "0000000000000040");
    assert_eq!(store(&format!("2a10 {one}{two} 3202 0001")), Ok(vec![(1.0, false), (2.0, true)]));
    assert_eq!(store(&format!("29{one} 29{two} 3000 3001")), Ok(vec![(1.0, false), (2.0, true)]));
    assert_eq!(store(&format!("2a10 {one}{two}")), Ok(vec![(1.0, false), (2.0, false)]));
    let counts = |what, found| Err(KwaaiWireError::Count { what, found, expected: 2 });
    assert_eq!(store(&format!("2a08 {one}")), counts("expirations", 1));
    assert_eq!(store(&format!("2a10 {one}{two} 3001")), counts("flags", 1));
    assert_eq!(store(&format!("2a10 {one}{two} 1a00")), counts("subkeys", 3));
    assert_eq!(store("2a07 00000000000000"), Err(KwaaiWireError::Truncated("expirations")));
}

#[test]
fn messages_that_lie_are_refused() {
    use KwaaiWireError::{Count, Length, NotText, OutOfRange, TooMany, Type, UnknownKind};
    let find = |hex: &str| DhtFindRequest::decode(&bytes(hex)).unwrap_err();
    assert_eq!(find("1201aa"), Length { what: "key", found: 1, expected: DHT_ID_BYTES });
    assert_eq!(find("1001"), Type("key"));
    assert_eq!(find("0a09 19000000000000f87f"), OutOfRange("time"));
    let keys = format!("12{KEY_HEX}").repeat(DHT_KEYS_MAX + 1);
    assert_eq!(find(&keys), TooMany { what: "keys", found: DHT_KEYS_MAX + 1, max: DHT_KEYS_MAX });
    let result = |hex: &str| DhtFindResponse::decode(&bytes(hex)).unwrap_err();
    assert_eq!(result("1202 0803"), UnknownKind("result type"));
    assert_eq!(result("1203 2a0170"), Count { what: "peers", found: 1, expected: 0 });
    let subkey = |hex: &str| DhtStoreRequest::decode(&bytes(hex)).unwrap_err();
    assert_eq!(subkey("1a0105"), Type("subkey"));
    assert_eq!(subkey("1a02a1ff"), NotText("subkey"));
    let flags = format!("12 8110 {}", "01".repeat(2049));
    let found = DhtStoreResponse::decode(&bytes(&flags)).unwrap_err();
    assert_eq!(found, TooMany { what: "flags", found: DHT_KEYS_MAX + 1, max: DHT_KEYS_MAX });
}

fn id() -> impl Strategy<Value = DhtId> {
    any::<[u8; DHT_ID_BYTES]>().prop_map(DhtId)
}

fn sender() -> impl Strategy<Value = DhtSender> {
    (prop::option::of(-1e18..1e18), prop::option::of(id())).prop_map(|(time, node)| DhtSender { time, node })
}

/// What generated messages borrow from.
fn parts() -> impl Strategy<Value = Vec<(DhtId, u8, String, Vec<u8>, f64, bool)>> {
    let value = prop::collection::vec(any::<u8>(), 0..40);
    prop::collection::vec((id(), 0..3_u8, ".{0,12}", value, -1e18..1e18, any::<bool>()), 0..8)
}

proptest! {
    #[test]
    fn requests_and_records_are_written_and_read(sender in sender(), parts in parts(), entries_max: Option<u64>) {
        let records: Vec<_> = parts.iter().map(|(key, kind, text, value, expires_at, in_cache)| DhtRecord {
            key: *key,
            subkey: [DhtSubkey::Plain, DhtSubkey::Whole, DhtSubkey::Entry(text)][usize::from(*kind)],
            value,
            expires_at: *expires_at,
            in_cache: *in_cache,
        }).collect();
        let find = DhtFindRequest { sender, keys: records.iter().map(|record| record.key).collect() };
        assert_eq!(DhtFindRequest::decode(&find.encode()), Ok(find));
        let stored = DhtStoreResponse { sender, accepted: records.iter().map(|record| record.in_cache).collect() };
        assert_eq!(DhtStoreResponse::decode(&stored.encode()), Ok(stored));
        let store = DhtStoreRequest { sender, records };
        assert_eq!(DhtStoreRequest::decode(&store.encode()).as_ref(), Ok(&store));
        let entries = parts.iter().map(|(_, _, subkey, value, expires_at, _)| DhtEntry { subkey, value, expires_at: *expires_at });
        let dictionary = DhtDictionary { entries_max, latest_expiration: 1.0, entries: entries.collect() };
        assert_eq!(DhtDictionary::decode(&dictionary.encode()).as_ref(), Ok(&dictionary));
    }

    #[test]
    fn results_are_written_and_read(sender in sender(), parts in parts()) {
        let nearest = |text: &'static [u8]| parts.iter().map(move |part| (part.0, text)).collect::<Vec<_>>();
        let results = parts.iter().map(|(_, kind, _, value, expires_at, _)| DhtFindResult {
            found: match kind {
                0 => DhtFound::Nothing,
                1 => DhtFound::Plain { value, expires_at: *expires_at },
                _ => DhtFound::Dictionary { value, expires_at: *expires_at },
            },
            nearest: nearest(b"peer"),
        });
        let response = DhtFindResponse { sender, results: results.collect() };
        assert_eq!(DhtFindResponse::decode(&response.encode()).as_ref(), Ok(&response));
    }

    #[test]
    fn a_cut_dictionary_is_refused(parts in parts(), cut: prop::sample::Index) {
        let entries = parts.iter().map(|(_, _, subkey, value, expires_at, _)| DhtEntry { subkey, value, expires_at: *expires_at });
        let dictionary = DhtDictionary { entries_max: None, latest_expiration: 1.0, entries: entries.collect() }.encode();
        assert!(DhtDictionary::decode(&dictionary[..cut.index(dictionary.len())]).is_err());
    }

    #[test]
    fn servers_are_written_and_read(state in -3..4_i64, throughput in -1e9..1e9, start in 0..100_u32, count in 1..100_u32, text in prop::option::of(".{0,12}"), flag: bool, cache_tokens_left: Option<u64>) {
        let text = text.as_deref();
        let state = match state {
            -1 => KwaaiServerState::Offline,
            0 => KwaaiServerState::Joining,
            2 => KwaaiServerState::Ready,
            other => KwaaiServerState::Other(other),
        };
        let info = KwaaiServerInfo {
            state,
            throughput,
            blocks: LayerRange::new(start, start + count).unwrap(),
            public_name: text,
            version: text,
            dtype: text,
            using_relay: flag,
            cache_tokens_left,
            peer: text,
            lease_v1: !flag,
        };
        assert_eq!(KwaaiServerInfo::decode(&info.encode()), Ok(info));
    }
}

#[test]
fn addresses_are_those_of_the_peer_that_was_asked_for() {
    // The type is 4; the key is field 2; the length is before both.
    assert_eq!(routing_request(b"abc"), bytes("07 0804 1203 616263"));
    let peer = |id: &[u8], addresses: &[&[u8]]| {
        let fields = addresses.iter().fold([b"\x0a", &[id.len() as u8][..], id].concat(), |fields, address| {
            [&fields[..], b"\x12", &[address.len() as u8], address].concat()
        });
        // How it is connected, which nobody needs.
        let fields = [&fields[..], b"\x18\x01"].concat();
        [b"\x42", &[fields.len() as u8][..], &fields].concat()
    };
    let response =
        [&b"\x08\x04"[..], &peer(b"xyz", &[b"1"]), &peer(b"abc", &[b"2", b"33"]), &peer(b"abcd", &[])].concat();
    assert_eq!(routing_addresses(&response, b"abc").unwrap(), [&b"2"[..], b"33"]);
    assert!(routing_addresses(&response, b"other").unwrap().is_empty());
    assert!(routing_addresses(&response[..response.len() - 1], b"abc").is_err());
    let many = peer(b"abc", &[&b"1"[..]; 40]);
    assert_eq!(routing_addresses(&many, b"abc").unwrap().len(), ROUTING_ADDRESSES_MAX);
}
