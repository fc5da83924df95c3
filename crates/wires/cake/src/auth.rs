//! Authentication: each side proves with HMAC-SHA256 of the other's nonce that it has the cluster key.
//!
//! The protocol does not say which side computed a proof, and a worker computes one for whoever asks. So a caller without
//! the key could send a nonce that it was challenged with on another connection, and get the answer to it. A process
//! therefore remembers the nonces of its own handshakes in progress, in both roles, and computes no proof for them.
//!
//! What follows a handshake is neither encrypted nor authenticated, which is in the nature of the protocol.

use std::collections::HashSet;
use std::fmt;
use std::io::{self, Read, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hmac::{Hmac, KeyInit as _, Mac as _};
use rustix::rand::{GetRandomFlags, getrandom};
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

const NONCE_BYTES: usize = 32;
const PROOF_BYTES: usize = 32;

type Nonce = [u8; NONCE_BYTES];
type Proof = [u8; PROOF_BYTES];

#[derive(Debug, thiserror::Error)]
pub enum CakeAuthError {
    #[error("the other side has another cluster key: give both the same one")]
    Key,
    #[error("the other side sent a nonce of this process as its own")]
    Reflected,
    #[error("authenticate: {0}")]
    Io(#[from] io::Error),
}

/// The key of a cake cluster. Clones share the nonces in use, so a process makes one and clones it.
#[derive(Clone)]
pub struct CakeKey {
    secret: Arc<[u8]>,
    nonces: Arc<Mutex<HashSet<Nonce>>>,
}

impl CakeKey {
    /// `None` if the text is empty.
    pub fn new(text: &str) -> Option<Self> {
        (!text.is_empty()).then(|| Self { secret: text.as_bytes().into(), nonces: Arc::default() })
    }

    /// What discovery calls the cluster: the first bytes of the key's hash, in hexadecimal.
    pub fn cluster_hash(&self) -> String {
        short_hash(&self.secret)
    }

    fn prove(&self, nonce: &Nonce) -> Proof {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.secret).expect("HMAC takes keys of any length");
        mac.update(nonce);
        mac.finalize().into_bytes().into()
    }

    fn challenge(&self) -> io::Result<Challenge<'_>> {
        let mut nonce = [0; NONCE_BYTES];
        let filled = getrandom(&mut nonce, GetRandomFlags::empty())?;
        if filled != NONCE_BYTES {
            return Err(io::ErrorKind::Interrupted.into());
        }
        self.nonces().insert(nonce);
        Ok(Challenge { key: self, nonce })
    }

    fn nonces(&self) -> MutexGuard<'_, HashSet<Nonce>> {
        self.nonces.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Without the key.
impl fmt::Debug for CakeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CakeKey")
    }
}

/// The first four bytes of a text's SHA-256, in hexadecimal.
pub(super) fn short_hash(text: &[u8]) -> String {
    let [a, b, c, d, ..] = <[u8; 32]>::from(Sha256::digest(text));
    format!("{:08x}", u32::from_be_bytes([a, b, c, d]))
}

/// A nonce that was sent to the other side. It counts as in use until this is dropped.
struct Challenge<'a> {
    key: &'a CakeKey,
    nonce: Nonce,
}

impl Challenge<'_> {
    fn check(&self, proof: &Proof) -> Result<(), CakeAuthError> {
        let is_equal: bool = self.key.prove(&self.nonce).ct_eq(proof).into();
        if is_equal { Ok(()) } else { Err(CakeAuthError::Key) }
    }
}

impl Drop for Challenge<'_> {
    fn drop(&mut self) {
        self.key.nonces().remove(&self.nonce);
    }
}

/// Authenticates on the side that connected. The stream's reads and writes need a deadline.
pub fn authenticate_as_master(key: &CakeKey, stream: &mut (impl Read + Write)) -> Result<(), CakeAuthError> {
    let challenge = key.challenge()?;
    stream.write_all(&challenge.nonce)?;
    let (mut proof, mut nonce) = ([0; PROOF_BYTES], [0; NONCE_BYTES]);
    stream.read_exact(&mut proof)?;
    stream.read_exact(&mut nonce)?;
    challenge.check(&proof)?;
    answer(key, &nonce, |proof| stream.write_all(proof))
}

/// Authenticates on the side that accepted. The stream's reads and writes need a deadline.
pub fn authenticate_as_worker(key: &CakeKey, stream: &mut (impl Read + Write)) -> Result<(), CakeAuthError> {
    let mut nonce = [0; NONCE_BYTES];
    stream.read_exact(&mut nonce)?;
    let challenge = key.challenge()?;
    answer(key, &nonce, |proof| stream.write_all(&[&proof[..], &challenge.nonce].concat()))?;
    let mut proof = [0; PROOF_BYTES];
    stream.read_exact(&mut proof)?;
    challenge.check(&proof)
}

/// Sends the proof for a nonce, unless this process has sent it.
fn answer(key: &CakeKey, nonce: &Nonce, send: impl FnOnce(&Proof) -> io::Result<()>) -> Result<(), CakeAuthError> {
    if key.nonces().contains(nonce) {
        return Err(CakeAuthError::Reflected);
    }
    Ok(send(&key.prove(nonce))?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::thread;

    use super::*;

    fn key(text: &str) -> CakeKey {
        CakeKey::new(text).unwrap()
    }

    /// The results of the master and of the worker.
    fn meet(master: &CakeKey, worker: &CakeKey) -> [Result<(), CakeAuthError>; 2] {
        let (mut left, mut right) = UnixStream::pair().unwrap();
        thread::scope(|scope| {
            let worker = scope.spawn(move || authenticate_as_worker(worker, &mut right));
            // The master's end is closed as soon as it knows, as a socket would be.
            let master = authenticate_as_master(master, &mut { left.try_clone().unwrap() });
            left.shutdown(std::net::Shutdown::Both).unwrap();
            let _ = left.flush();
            [master, worker.join().unwrap()]
        })
    }

    #[test]
    fn both_sides_with_the_key_are_content() {
        let [master, worker] = meet(&key("a key"), &key("a key"));
        assert!(master.is_ok() && worker.is_ok(), "{master:?} {worker:?}");
    }

    #[test]
    fn another_key_is_refused_by_both_sides() {
        let [master, worker] = meet(&key("a key"), &key("another key"));
        assert!(matches!(master, Err(CakeAuthError::Key)), "{master:?}");
        assert!(worker.is_err());
    }

    #[test]
    fn proofs_and_hashes_are_those_of_the_standard() {
        // RFC 4231 has no 32-byte message; these come from Python's hmac and hashlib.
        let key = key("consort");
        let proof: Vec<String> = key.prove(&[7; 32]).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(proof.concat(), "ddcfdacbb719fcd95aa20b4c49e8784d329d100800cc480ed785e49020248cce");
        assert_eq!(key.cluster_hash(), "53aac2b2");
        assert_eq!(format!("{key:?}"), "CakeKey");
    }

    /// An attacker's side of the worker's handshake: sends `nonce`, returns the proof and the worker's nonce.
    fn ask(stream: &mut UnixStream, nonce: &Nonce) -> io::Result<(Proof, Nonce)> {
        let (mut proof, mut challenge) = ([0; PROOF_BYTES], [0; NONCE_BYTES]);
        stream.write_all(nonce)?;
        stream.read_exact(&mut proof)?;
        stream.read_exact(&mut challenge)?;
        Ok((proof, challenge))
    }

    #[test]
    fn a_worker_does_not_answer_its_own_challenge() {
        let (worker, other) = (key("a key"), key("a key"));
        let (mut first, mut first_end) = UnixStream::pair().unwrap();
        let (mut second, mut second_end) = UnixStream::pair().unwrap();
        let (mut third, mut third_end) = UnixStream::pair().unwrap();
        thread::scope(|scope| {
            let served = [
                scope.spawn(|| authenticate_as_worker(&worker, &mut first_end)),
                scope.spawn(|| {
                    let refused = authenticate_as_worker(&worker, &mut second_end);
                    drop(second_end);
                    refused
                }),
                scope.spawn(|| authenticate_as_worker(&other, &mut third_end)),
            ];
            let (_, challenge) = ask(&mut first, &[1; NONCE_BYTES]).unwrap();
            assert!(ask(&mut second, &challenge).is_err());
            // Without the check the attack succeeds: another process answers, since it cannot know.
            let (proof, _) = ask(&mut third, &challenge).unwrap();
            first.write_all(&proof).unwrap();
            drop((second, third));
            let [first, second, third] = served.map(|served| served.join().unwrap());
            assert!(first.is_ok() && third.is_err());
            assert!(matches!(second, Err(CakeAuthError::Reflected)), "{second:?}");
        });
        assert!(worker.nonces().is_empty());
    }

    #[test]
    fn a_master_does_not_answer_its_own_challenge() {
        let key = key("a key");
        let (mut master, mut worker) = UnixStream::pair().unwrap();
        thread::scope(|scope| {
            let refused = scope.spawn(|| authenticate_as_master(&key, &mut master));
            let mut nonce = [0; NONCE_BYTES];
            worker.read_exact(&mut nonce).unwrap();
            // It has the key, and still must not be answered.
            worker.write_all(&[&key.prove(&nonce)[..], &nonce].concat()).unwrap();
            assert!(matches!(refused.join().unwrap(), Err(CakeAuthError::Reflected)));
        });
    }

    #[test]
    fn a_worker_does_not_answer_the_challenge_of_a_master_in_its_process() {
        let key = key("a key");
        let (mut master, mut attacker) = UnixStream::pair().unwrap();
        let (mut attacker_again, mut worker) = UnixStream::pair().unwrap();
        thread::scope(|scope| {
            let master = scope.spawn(|| authenticate_as_master(&key, &mut master));
            let worker = scope.spawn(|| authenticate_as_worker(&key, &mut worker));
            let mut nonce = [0; NONCE_BYTES];
            attacker.read_exact(&mut nonce).unwrap();
            attacker_again.write_all(&nonce).unwrap();
            assert!(matches!(worker.join().unwrap(), Err(CakeAuthError::Reflected)));
            drop(attacker);
            assert!(matches!(master.join().unwrap(), Err(CakeAuthError::Io(_))));
        });
    }
}
