//! The identity in its file, and signatures.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use directory::{Signer, Verifier};
use libp2p_node::{Identity, IdentityError, InlinedKeys, NetworkKey, parse_peer, peer_text};

#[test]
fn an_identity_is_created_once_and_only_its_owner_reads_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a/b/key");
    let created = Identity::load_or_create(&path).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    assert_eq!(fs::metadata(path.parent().unwrap()).unwrap().mode() & 0o777, 0o700);
    assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "no draft is left");
    assert_eq!(Identity::load_or_create(&path).unwrap().peer(), created.peer());
}

#[test]
fn processes_that_create_an_identity_at_once_get_the_same_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("key");
    let peers: Vec<_> = std::thread::scope(|scope| {
        let create = || Identity::load_or_create(&path).unwrap().peer();
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(create)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(peers.iter().all(|peer| *peer == peers[0]), "{peers:?}");
}

#[test]
fn a_file_that_others_can_read_or_that_holds_no_key_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("key");
    Identity::load_or_create(&path).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
    let error = Identity::load_or_create(&path).unwrap_err();
    assert!(matches!(error, IdentityError::Mode { mode: 0o640, .. }), "{error}");
    fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    fs::set_permissions(folder.path(), Permissions::from_mode(0o777)).unwrap();
    let error = Identity::load_or_create(&path).unwrap_err();
    assert!(matches!(error, IdentityError::FolderMode { mode: 0o777, .. }), "{error}");
    fs::set_permissions(folder.path(), Permissions::from_mode(0o700)).unwrap();
    let long = vec![0; 1 << 20];
    for bytes in [&b""[..], b"no key", &long] {
        fs::write(&path, bytes).unwrap();
        let error = Identity::load_or_create(&path).unwrap_err();
        assert!(matches!(error, IdentityError::Content { .. }), "{error}");
    }
    fs::remove_file(&path).unwrap();
    symlink("/dev/null", &path).unwrap();
    let error = Identity::load_or_create(&path).unwrap_err();
    assert!(matches!(error, IdentityError::Content { .. }), "{error}");
}

#[test]
fn a_signature_is_valid_for_its_peer_and_message_alone() {
    let (one, other) = (Identity::ephemeral(), Identity::ephemeral());
    let signature = one.sign(b"message");
    assert!(InlinedKeys.verify(&one.peer(), b"message", &signature));
    assert!(!InlinedKeys.verify(&one.peer(), b"another", &signature));
    assert!(!InlinedKeys.verify(&other.peer(), b"message", &signature));
    assert!(!InlinedKeys.verify(&one.peer(), b"message", &signature[1..]));
    // The hash of an RSA key, and bytes that are no peer id.
    let hashed = parse_peer("QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC").unwrap();
    assert!(!InlinedKeys.verify(&hashed, b"message", &signature));
    assert!(!InlinedKeys.verify(&directory::PeerId::new(&[1; 9]).unwrap(), b"message", &signature));
}

#[test]
fn a_peer_is_written_in_base58() {
    let peer = Identity::ephemeral().peer();
    let text = peer_text(&peer);
    assert!(text.starts_with("12D3KooW"), "{text}");
    assert_eq!(parse_peer(&text), Some(peer));
    assert_eq!(parse_peer(&text[1..]), None);
}

#[test]
fn a_network_key_is_64_digits() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("swarm.key");
    let digits = "0123456789abcdef".repeat(4);
    for text in [format!("{digits}\n"), format!("/key/swarm/psk/1.0.0/\n/base16/\n{digits}\n")] {
        fs::write(&path, text).unwrap();
        NetworkKey::read(&path).unwrap();
    }
    for text in [String::new(), digits[1..].to_owned(), digits.replace('0', "é"), digits.repeat(100)] {
        fs::write(&path, &text).unwrap();
        assert!(NetworkKey::read(&path).is_err(), "{text}");
    }
}
