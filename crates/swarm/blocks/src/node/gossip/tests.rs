//! An exchange of records with a peer that lies, floods, or says nothing.

use directory::{BlockRecord, BlockUse, CLOCK_SKEW_MS, CROWD, Reach, ServiceState, Speed, VerifiedRecord, Verifier};
use libp2p_node::Identity;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use types::{DType, LayerRange};

use super::*;

const MODEL: ModelDigest = ModelDigest([5; 32]);
const TELLER: AddressBlock = AddressBlock::UNKNOWN;
/// More than this machine's clock may be wrong.
const HOUR_MS: u64 = 3_600_000;

fn record(peer: PeerId, issued: UnixTime) -> BlockRecord {
    BlockRecord {
        peer,
        sequence: issued.0,
        issued,
        lifetime_ms: 60_000,
        model: MODEL,
        layers: LayerRange::new(0, 4).unwrap(),
        block_use: BlockUse::AnyRange,
        dtype: DType::F32,
        state: ServiceState::Serving,
        reach: Reach::Direct,
        speed: Speed { layer_seconds: 0.01, layer_tokens_per_s: 100.0, queue_seconds: 0.0, bytes_per_s: 1e7 },
        kv_tokens_free: 1000,
        coordinate: None,
        neighbours: Vec::new(),
    }
}

fn signed(identity: &Identity, record: BlockRecord) -> Vec<u8> {
    SignedRecord::sign(record, identity).unwrap().encode()
}

/// Sends these frames to a node that knows nothing, as a peer that asks for all records.
async fn told(frames: &[(u8, Vec<u8>)]) -> (Result<(), ExchangeError>, SwarmView) {
    let view = SwarmView::default();
    let (mut ours, theirs) = duplex(1 << 12);
    let tell = async {
        let since = 0_u64.to_le_bytes();
        for (kind, body) in [(kind::ASK, since.to_vec())].iter().chain(frames) {
            if write_frame(&mut ours, *kind, body).await.is_err() {
                return;
            }
        }
        let mut rest = Vec::new();
        let _ = ours.read_to_end(&mut rest).await;
    };
    let (answered, ()) = tokio::join!(answer(theirs, &view, TELLER), tell);
    (answered, view)
}

/// What two peers exchange is what each of them knows.
#[tokio::test]
async fn honest_peers_learn_each_others_records() {
    let [view, other] = [SwarmView::default(), SwarmView::default()];
    for view in [&view, &other] {
        let identity = Identity::ephemeral();
        let signed = SignedRecord::sign(record(identity.peer(), now()), &identity).unwrap();
        view.insert(signed.verify(&InlinedKeys, now()).unwrap()).unwrap();
    }
    // A record that a user configured is nobody else's.
    let configured = VerifiedRecord::configured(record(PeerId::new(&[1]).unwrap(), now())).unwrap();
    view.insert(configured).unwrap();
    let (mut ours, theirs) = duplex(1 << 16);
    let ask = async {
        write_frame(&mut ours, kind::ASK, &[&MODEL.0[..], &[0; 8]].concat()).await.unwrap();
        send(&mut ours, &view, Some(&MODEL), UnixTime(0)).await.unwrap();
        receive(&mut ours, &view, TELLER).await.unwrap();
    };
    let (answered, ()) = tokio::join!(answer(theirs, &other, TELLER), ask);
    answered.unwrap();
    assert_eq!((view.records(None).len(), other.records(None).len()), (3, 2));
}

#[tokio::test]
async fn only_records_that_their_own_peers_signed_are_taken() {
    let (liar, victim) = (Identity::ephemeral(), Identity::ephemeral());
    let good = signed(&liar, record(liar.peer(), now()));
    let mut broken = good.clone();
    *broken.last_mut().unwrap() ^= 1;
    // The liar's signature under another peer's record.
    let theirs = signed(&victim, record(victim.peer(), now()));
    let signature = &good[good.len() - 66..];
    let stolen = [&theirs[..theirs.len() - 66], signature].concat();
    // No signature at all.
    let bare = [&theirs[..theirs.len() - 66], &[0, 0]].concat();
    // A value was changed after it was signed: the layers' end.
    let mut changed = good.clone();
    let at = 1 + 1 + liar.peer().as_bytes().len() + 8 + 8 + 4 + 32 + 4;
    changed[at] += 1;
    for record in [broken, stolen, bare, changed] {
        let (answered, view) = told(&[(kind::RECORD, record), (kind::RECORD, good.clone()), (kind::END, vec![])]).await;
        assert!(matches!(answered, Err(ExchangeError::Record(RecordError::Signature { .. }))), "{answered:?}");
        assert!(view.records(None).is_empty(), "nothing more is taken from who passes it on");
    }
}

#[tokio::test]
async fn expired_and_future_records_are_left_out_and_others_taken() {
    let identities: Vec<Identity> = (0..3).map(|_| Identity::ephemeral()).collect();
    let times = [UnixTime(now().0 - HOUR_MS), now().plus(HOUR_MS), now()];
    let records = identities.iter().zip(times).map(|(identity, time)| signed(identity, record(identity.peer(), time)));
    let frames: Vec<_> = records.map(|record| (kind::RECORD, record)).chain([(kind::END, vec![])]).collect();
    let (answered, view) = told(&frames).await;
    answered.unwrap();
    let peers: Vec<PeerId> = view.records(None).iter().map(|record| record.peer).collect();
    assert_eq!(peers, [identities[2].peer()]);
}

#[tokio::test]
async fn an_older_record_does_not_replace_a_newer_one() {
    let identity = Identity::ephemeral();
    let older = record(identity.peer(), UnixTime(now().0 - 1000));
    let newer = BlockRecord { layers: LayerRange::new(2, 4).unwrap(), ..record(identity.peer(), now()) };
    let frames = [newer.clone(), older].map(|record| (kind::RECORD, signed(&identity, record)));
    let (answered, view) = told(&[frames[0].clone(), frames[1].clone(), (kind::END, vec![])]).await;
    answered.unwrap();
    assert_eq!(view.records(None), [newer]);
}

/// A flood of fresh records with times as late as they may be, from one address.
#[tokio::test]
async fn a_flood_is_neither_told_on_nor_in_the_way_of_others() {
    let honest = Identity::ephemeral();
    let late = now().plus(CLOCK_SKEW_MS / 2);
    let flood = (0..2 * CROWD).map(|_| Identity::ephemeral()).map(|identity| {
        let record = record(identity.peer(), late);
        (kind::RECORD, signed(&identity, record))
    });
    let (answered, view) = told(&flood.chain([(kind::END, vec![])]).collect::<Vec<_>>()).await;
    answered.unwrap();
    let own = SignedRecord::sign(record(honest.peer(), now()), &honest).unwrap().verify(&InlinedKeys, now()).unwrap();
    view.insert_told(own, AddressBlock::of([203, 0, 113, 1].into())).unwrap();
    assert_eq!(view.records(None).len(), 2 * CROWD + 1);
    let mut sent = Vec::new();
    send(&mut sent, &view, Some(&MODEL), UnixTime(0)).await.unwrap();
    let other = SwarmView::default();
    receive(&mut &sent[..], &other, TELLER).await.unwrap();
    assert_eq!(other.records(None).iter().map(|record| record.peer).collect::<Vec<_>>(), [honest.peer()]);
}

#[tokio::test]
async fn an_exchange_has_a_limited_number_of_records() {
    let identity = Identity::ephemeral();
    // The same record over and over costs no signatures.
    let frame = (kind::RECORD, signed(&identity, record(identity.peer(), now())));
    let mut frames = vec![frame.clone(); RECORDS_MAX];
    frames.push((kind::END, vec![]));
    assert!(told(&frames).await.0.is_ok());
    frames.insert(0, frame);
    let (answered, view) = told(&frames).await;
    assert!(matches!(answered, Err(ExchangeError::TooMany)), "{answered:?}");
    assert_eq!(view.records(None).len(), 1);
}

#[tokio::test]
async fn messages_of_other_kinds_and_lengths_end_an_exchange() {
    let none = SwarmView::default();
    for ask in [
        (kind::ASK, vec![0; 7]),
        (kind::ASK, vec![0; 39]),
        (kind::ASK, vec![0; 41]),
        (kind::ASK, vec![]),
        (kind::RECORD, vec![0; 8]),
        (77, vec![0; 8]),
    ] {
        let (mut ours, theirs) = duplex(1 << 12);
        write_frame(&mut ours, ask.0, &ask.1).await.unwrap();
        assert!(answer(theirs, &none, TELLER).await.is_err(), "{ask:?}");
    }
    let identity = Identity::ephemeral();
    let good = signed(&identity, record(identity.peer(), now()));
    for bad in [
        (kind::ASK, vec![0; 8]),
        (9, vec![]),
        (kind::RECORD, vec![]),
        (kind::RECORD, good[..good.len() - 1].to_vec()),
        (kind::RECORD, [&good[..], &[0]].concat()),
        (kind::RECORD, vec![1; RECORD_BYTES_MAX + 1]),
    ] {
        let (answered, view) = told(&[bad.clone(), (kind::END, vec![])]).await;
        assert!(answered.is_err() && view.records(None).is_empty(), "{bad:?}");
    }
}

/// [`EXCHANGE_TIME_MAX`] limits the whole exchange; within it a frame has to end too.
#[tokio::test(start_paused = true)]
async fn a_peer_that_drips_bytes_or_does_not_read_is_given_up() {
    let view = SwarmView::default();
    let drip = async |bytes: &[u8]| {
        let (mut ours, theirs): (DuplexStream, DuplexStream) = duplex(64);
        let drip = async {
            for byte in bytes {
                if ours.write_all(&[*byte]).await.is_err() {
                    return;
                }
                tokio::time::sleep(EXCHANGE_TIME_MAX / 8).await;
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            answered = timeout(EXCHANGE_TIME_MAX, answer(theirs, &view, TELLER)) => answered.is_err(),
            () = drip => false,
        }
    };
    assert!(drip(&[8, 0, 0, 0, kind::ASK, 0, 0, 0, 0, 0, 0, 0, 0]).await);
    assert!(drip(&[]).await);
}

#[test]
fn a_signature_of_a_peer_whose_key_is_not_its_id_is_never_valid() {
    let peer = PeerId::new(&[0x12; 34]).unwrap();
    assert!(!InlinedKeys.verify(&peer, b"message", &[0; 64]));
}
