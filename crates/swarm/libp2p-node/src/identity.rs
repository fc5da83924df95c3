//! `Identity`: the Ed25519 key of a node, in a file that only its owner can read.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process;

use libp2p_identity::{KeyType, Keypair, PeerId, PublicKey};

use crate::error::IdentityError;
use crate::peer_id;

/// libp2p writes an Ed25519 key in 68 bytes.
const FILE_BYTES_MAX: u64 = 128;
const FILE_MODE: u32 = 0o600;
const FOLDER_MODE: u32 = 0o700;
/// The code of a multihash that is the bytes themselves.
const IDENTITY_HASH: u64 = 0;

#[derive(Clone)]
pub struct Identity {
    keypair: Keypair,
}

/// Verifies signatures of peers whose id is their public key, as with all Ed25519 keys. The key of other peers is not
/// known, so no signature of theirs is valid.
#[derive(Clone, Copy, Debug, Default)]
pub struct InlinedKeys;

impl Identity {
    /// The key in this file. If there is none, a new key is saved there first; its folders are made as needed.
    pub fn load_or_create(path: &Path) -> Result<Self, IdentityError> {
        match Self::load(path) {
            Err(IdentityError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Self::create(path),
            outcome => outcome,
        }
    }

    /// A new key that is not saved.
    pub fn ephemeral() -> Self {
        Self { keypair: Keypair::generate_ed25519() }
    }

    pub fn peer(&self) -> directory::PeerId {
        peer_id::from_libp2p(&self.keypair.public().to_peer_id())
    }

    pub(crate) fn keypair(&self) -> &Keypair {
        &self.keypair
    }

    fn load(path: &Path) -> Result<Self, IdentityError> {
        let failed = |source| IdentityError::Io { path: path.to_owned(), source };
        let content = || IdentityError::Content { path: path.to_owned() };
        // Without waiting, should it be a pipe.
        let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(failed)?;
        let facts = file.metadata().map_err(failed)?;
        if !facts.is_file() {
            return Err(content());
        }
        if facts.mode() & 0o077 != 0 {
            return Err(IdentityError::Mode { path: path.to_owned(), mode: facts.mode() & 0o777 });
        }
        let folder = fs::metadata(folder_of(path)).map_err(failed)?;
        // In a folder with the sticky bit others can not replace the file.
        if folder.mode() & 0o022 != 0 && folder.mode() & 0o1000 == 0 {
            return Err(IdentityError::FolderMode { path: path.to_owned(), mode: folder.mode() & 0o777 });
        }
        let mut bytes = Vec::new();
        file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
        let keypair = Keypair::from_protobuf_encoding(&bytes).map_err(|_| content())?;
        match keypair.key_type() {
            KeyType::Ed25519 => Ok(Self { keypair }),
            _ => Err(content()),
        }
    }

    /// Saves a new key under another name first, so that no reader sees a part of it. If another process has saved one
    /// meanwhile, that is the key.
    fn create(path: &Path) -> Result<Self, IdentityError> {
        let failed = |source| IdentityError::Io { path: path.to_owned(), source };
        DirBuilder::new().recursive(true).mode(FOLDER_MODE).create(folder_of(path)).map_err(failed)?;
        let identity = Self::ephemeral();
        let bytes = identity.keypair.to_protobuf_encoding().expect("an Ed25519 key can be written");
        let draft = draft_of(path, &identity);
        let saved = save(&draft, &bytes).and_then(|()| fs::hard_link(&draft, path));
        let removed = fs::remove_file(&draft);
        match saved {
            Ok(()) => removed.map(|()| identity).map_err(failed),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Self::load(path),
            Err(error) => Err(failed(error)),
        }
    }
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A name that no other process uses: it contains the new key's peer.
fn draft_of(path: &Path, identity: &Identity) -> PathBuf {
    let peer = identity.keypair.public().to_peer_id();
    folder_of(path).join(format!(".identity-{}-{peer}", process::id()))
}

fn save(draft: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file: File = OpenOptions::new().write(true).create_new(true).mode(FILE_MODE).open(draft)?;
    file.write_all(bytes)?;
    file.sync_all()
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Identity({})", self.keypair.public().to_peer_id())
    }
}

impl directory::Signer for Identity {
    fn peer(&self) -> directory::PeerId {
        self.peer()
    }

    fn sign(&self, message: &[u8]) -> Vec<u8> {
        self.keypair.sign(message).expect("an Ed25519 key signs every message")
    }
}

impl directory::Verifier for InlinedKeys {
    fn verify(&self, peer: &directory::PeerId, message: &[u8], signature: &[u8]) -> bool {
        inlined_key(peer).is_some_and(|key| key.verify(message, signature))
    }
}

fn inlined_key(peer: &directory::PeerId) -> Option<PublicKey> {
    let peer: PeerId = peer_id::to_libp2p(peer)?;
    let hash = peer.as_ref();
    if hash.code() != IDENTITY_HASH {
        return None;
    }
    let key = PublicKey::try_decode_protobuf(hash.digest()).ok()?;
    // One key has one id, although its bytes could be written in several ways.
    (key.key_type() == KeyType::Ed25519 && key.to_peer_id() == peer).then_some(key)
}
