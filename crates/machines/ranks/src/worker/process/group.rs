//! How a rank joins a group: by a segment that its supervisor made, by an id that the ranks share, or by the addresses
//! of ranks on other hosts.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Instant;

use kernels::Backend as _;
use kernels::cpu::{CpuBackend, CpuOptions};
use model::{Collective as _, CollectiveError};
use net::ClusterKey;
use tracing::info;
use types::WorldSize;

use super::{RankServer, count};
use crate::protocol::join::{Activations, JoinTimeouts, Secret};
use crate::protocol::{ErrorKind, RankReply};
use crate::worker::peers::{Peers, RequestDigest};
use crate::worker::rank_zero::has_rank_zero;
use crate::worker::rendezvous::Rendezvous;
use crate::worker::request_error::RequestError;
use collectives::EXCHANGE_ELEMENTS_MAX;
use collectives::shared_memory::{Epoch, GroupLimits, Segment};
use collectives::tcp::{TcpComm, TcpCommOptions, TcpGroup};

/// The digest of a sanity check.
const SANITY_CHECK: RequestDigest = [0; 32];

impl RankServer {
    /// Checks that the request names this rank and world size.
    pub(super) fn check_rank(&self, world_size: u16, rank: u16) -> Result<(), RequestError> {
        let asked = WorldSize::new(world_size).and_then(|world| world.rank(rank));
        if asked == Some(self.rank) {
            return Ok(());
        }
        Err(RequestError::new(ErrorKind::BadRequest, format!("this is rank {}, not {rank}/{world_size}", self.rank)))
    }

    pub(super) fn attach(&mut self, segment_fd: u32, elements_max: u64, epoch: Epoch) -> Result<(), RequestError> {
        let limits = GroupLimits { world: self.rank.world(), elements_max: count(elements_max)? };
        let segment = Segment::attach(inherited(segment_fd)?, limits)?;
        let comm = segment.join(self.rank, epoch)?;
        self.peers = None;
        self.collective.join(comm)?;
        self.forget_sessions();
        info!(rank = self.rank.index(), %epoch, "joined the group");
        Ok(())
    }

    pub(super) fn listen(&mut self, id: u64, host: IpAddr) -> Result<RankReply, RequestError> {
        let failed = |error: io::Error| {
            RequestError::new(ErrorKind::NcclInitFailed, format!("can not listen at {host}: {error}"))
        };
        let listener = bind(host).map_err(failed)?;
        let port = listener.local_addr().map_err(failed)?.port();
        self.listener = Some(listener);
        Ok(RankReply::Listening { id, port })
    }

    pub(super) fn join(
        &mut self,
        epoch: Epoch,
        addresses: &[SocketAddr],
        key: &Secret,
        encoding: Activations,
        timeouts: JoinTimeouts,
    ) -> Result<(), RequestError> {
        // The port is closed when all ranks are connected, or connecting has failed.
        let unasked = || RequestError::new(ErrorKind::BadRequest, "`listen` comes before `join`");
        let listener = self.listener.take().ok_or_else(unasked)?;
        let group = TcpGroup { rank: self.rank, listener: &listener, addresses, epoch };
        let options = TcpCommOptions {
            elements_max: EXCHANGE_ELEMENTS_MAX,
            encoding: encoding.into(),
            stall_deadline: timeouts.stall()?,
            silence_deadline: timeouts.silence()?,
        };
        let (key, deadline) = (ClusterKey::from_bytes(key.bytes()), Instant::now() + timeouts.connect()?);
        self.peers = None;
        let connected = self.collective.connect(epoch, |abort| TcpComm::connect(group, &key, options, abort, deadline));
        self.forget_sessions();
        connected?;
        info!(rank = self.rank.index(), %epoch, "joined the ranks of other hosts");
        Ok(())
    }

    pub(super) fn init(&mut self, comm_id: &str) -> Result<RankReply, RequestError> {
        let limits = GroupLimits { world: self.rank.world(), elements_max: EXCHANGE_ELEMENTS_MAX };
        let rendezvous = Rendezvous::new(comm_id, limits, Instant::now() + self.init_timeout)?;
        // Whether this succeeds or not, the previous group is over.
        self.leave();
        let (abort, world) = (self.collective.abort_handle(), self.rank.world());
        let met = rendezvous.meet(self.rank, &|| abort.has_ended(), &|| has_rank_zero(world))?;
        self.collective.join(met.comm)?;
        if world != WorldSize::ONE {
            let (collective, timeout) = (self.collective.clone(), self.collective_timeout);
            let peers = Peers::new(self.rank, met.segment, met.connections, timeout, move || collective.spent().0);
            let failed =
                |error: io::Error| RequestError::new(ErrorKind::NcclInitFailed, format!("watch the ranks: {error}"));
            self.peers = Some(peers.map_err(failed)?);
        }
        Ok(RankReply::InitOk)
    }

    /// Agrees with the other ranks of an `init` on the request of `digest`: if one of them cannot run it, none does.
    /// Returns what this rank has `prepared` for it.
    pub(super) fn agree<T>(
        &mut self,
        digest: RequestDigest,
        prepared: Result<T, RequestError>,
    ) -> Result<T, RequestError> {
        let agreed = self.agreed(digest, prepared.is_ok());
        // This rank's own error says more than that the group has rejected the request.
        let prepared = prepared?;
        agreed?;
        Ok(prepared)
    }

    fn agreed(&mut self, digest: RequestDigest, is_ready: bool) -> Result<(), RequestError> {
        let Some(peers) = &mut self.peers else { return Ok(()) };
        let abort = self.collective.abort_handle();
        if let Some(comm) = peers.renew(&|| abort.has_ended())? {
            info!(rank = self.rank.index(), epoch = %comm.epoch(), "joined the next epoch");
            self.collective.join(comm)?;
        }
        Ok(peers.agree(digest, is_ready)?)
    }

    /// Leaves the group.
    fn leave(&mut self) {
        self.peers = None;
        self.collective.leave();
        self.forget_sessions();
    }

    pub(super) fn sanity_check(&mut self) -> Result<RankReply, RequestError> {
        if self.collective.epoch().is_none() {
            return Err(RequestError::new(ErrorKind::NcclNotInitialised, "the rank is in no group"));
        }
        self.agree(SANITY_CHECK, Ok(()))?;
        let _stepping = self.peers.as_ref().map(Peers::stepping);
        let failed = |message: String| {
            self.collective.abandon();
            RequestError::new(ErrorKind::NcclSanityFailed, message)
        };
        match self.sum_of_ones() {
            Ok(sum) if sum == self.rank.world().get() as f32 => {
                Ok(RankReply::NcclSanityResult { observed_sum: sum as u64 })
            }
            Ok(sum) => Err(failed(format!("the ranks add up to {sum}"))),
            Err(error) => Err(failed(error.to_string())),
        }
    }

    /// All-reduces a 1 from each rank.
    fn sum_of_ones(&self) -> Result<f32, CollectiveError> {
        let backend = CpuBackend::new(CpuOptions { threads: 1, ..CpuOptions::default() })?;
        let (mut buffer, mut sum) = (backend.buffer(1, 1)?, [1.0]);
        backend.write(&mut buffer, &sum)?;
        self.collective.all_reduce(&backend, 1, &mut buffer)?;
        backend.read(&buffer, 0..1, &mut sum)?;
        Ok(sum[0])
    }
}

/// Binds a free port of `host`. If that is not an address of this machine, as behind NAT, binds all addresses.
fn bind(host: IpAddr) -> io::Result<TcpListener> {
    let all: &[IpAddr] = match host {
        IpAddr::V4(_) => &[IpAddr::V4(Ipv4Addr::UNSPECIFIED)],
        // IPv6 and IPv4 together, where the system supports both.
        IpAddr::V6(_) => &[IpAddr::V6(Ipv6Addr::UNSPECIFIED), IpAddr::V4(Ipv4Addr::UNSPECIFIED)],
    };
    let bind = |&host: &IpAddr| TcpListener::bind((host, 0));
    bind(&host).or_else(|error| all.iter().find_map(|host| bind(host).ok()).ok_or(error))
}

/// Opens an inherited memfd again. The inherited descriptor stays open, because a later epoch attaches to it again.
fn inherited(fd: u32) -> Result<OwnedFd, RequestError> {
    let path = PathBuf::from(format!("/proc/self/fd/{fd}"));
    let failed =
        |why: String| RequestError::new(ErrorKind::NcclInitFailed, format!("descriptor {fd} is no segment: {why}"));
    // Opening anything but a memfd again may have side effects: it may be a device or a pipe.
    let target = fs::read_link(&path).map_err(|error| failed(error.to_string()))?;
    if !target.as_os_str().as_encoded_bytes().starts_with(b"/memfd:") {
        return Err(failed("it is no memory file".to_owned()));
    }
    let file = fs::OpenOptions::new().read(true).write(true).open(path).map_err(|error| failed(error.to_string()))?;
    Ok(file.into())
}
