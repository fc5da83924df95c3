//! Which segments can be created and attached to.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use collectives::shared_memory::{GroupLimits, SEGMENT_BYTES_MAX, Segment, SegmentError};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use types::WorldSize;

use testing::shared_memory_group::Group;

fn memfd(bytes: u64, seals: SealFlags) -> OwnedFd {
    let file = File::from(memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap());
    file.set_len(bytes).unwrap();
    let fd = OwnedFd::from(file);
    fcntl_add_seals(&fd, seals).unwrap();
    fd
}

fn bytes_of(group: &Group) -> u64 {
    File::from(group.fd()).metadata().unwrap().len()
}

const SEALED: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

#[test]
fn a_segment_beyond_the_limit_is_refused() {
    let world = WorldSize::new(u16::MAX).unwrap();
    for elements_max in [SEGMENT_BYTES_MAX / 4, usize::MAX / 4, usize::MAX] {
        let error = Segment::create(GroupLimits { world, elements_max }).unwrap_err();
        assert!(matches!(error, SegmentError::TooLarge { world: 65535, .. }), "{error}");
    }
    let limits = GroupLimits { world: WorldSize::new(2).unwrap(), elements_max: SEGMENT_BYTES_MAX / 16 };
    assert!(Segment::create(limits).is_err(), "the words need memory too");
    let limits = GroupLimits { elements_max: SEGMENT_BYTES_MAX / 16 - (1 << 18), ..limits };
    Segment::create(limits).unwrap();
}

#[test]
fn what_could_shrink_under_a_mapping_is_not_attached_to() {
    let group = Group::new(2, 100);
    for seals in [SealFlags::empty(), SealFlags::GROW, SealFlags::SHRINK] {
        let error = Segment::attach(memfd(bytes_of(&group), seals), group.limits).unwrap_err();
        assert!(matches!(error, SegmentError::Unsealed), "{error}");
    }
    let ordinary = File::open(std::env::current_exe().unwrap()).unwrap();
    assert!(Segment::attach(ordinary.into(), group.limits).is_err());
    assert!(File::from(group.fd()).set_len(1).is_err(), "a segment cannot be cut short");
}

#[test]
fn a_segment_of_another_size_or_of_other_limits_is_not_attached_to() {
    let group = Group::new(2, 100);
    let short = Segment::attach(memfd(bytes_of(&group) - 1, SEALED), group.limits).unwrap_err();
    assert!(matches!(short, SegmentError::Size { .. }), "{short}");
    let empty = Segment::attach(memfd(0, SEALED), group.limits).unwrap_err();
    assert!(matches!(empty, SegmentError::Size { found: 0, .. }), "{empty}");
    let larger = GroupLimits { elements_max: 1 << 20, ..group.limits };
    assert!(matches!(Segment::attach(group.fd(), larger), Err(SegmentError::Size { .. })));
    // The segment has the same size, because slots are whole cache lines.
    let other = GroupLimits { elements_max: 99, ..group.limits };
    let error = Segment::attach(group.fd(), other).unwrap_err();
    assert!(matches!(error, SegmentError::Limits { world: 2, elements_max: 100 }), "{error}");
    Segment::attach(group.fd(), group.limits).unwrap();
}

#[test]
fn a_segment_of_another_kind_or_version_is_not_attached_to() {
    let group = Group::new(2, 100);
    let error = Segment::attach(memfd(bytes_of(&group), SEALED), group.limits).unwrap_err();
    assert!(matches!(error, SegmentError::Magic), "{error}");
    File::from(group.fd()).write_all_at(&9_u64.to_le_bytes(), 8).unwrap();
    let error = Segment::attach(group.fd(), group.limits).unwrap_err();
    assert!(matches!(error, SegmentError::Version { ours: 7, theirs: 9 }), "{error}");
}
