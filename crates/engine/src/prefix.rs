//! `Prefix`: how a prompt begins, told so that whoever holds K/V can find pages that were computed before.
//!
//! A page is named by a hash of its tokens and of the name of the page before it, so equal names mean equal tokens from
//! the very first on: the hash is a cryptographic one of 256 bits, and names are compared whole. The first page is
//! salted with the tenant. Holders of K/V see names, not tokens, and each of them keeps pages of its own.

use types::TokenId;

use crate::request::Tenant;

/// The name of a whole page of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageHash(pub [u8; 32]);

/// The beginning of a session.
#[derive(Clone, Copy, Debug)]
pub struct Prefix<'a> {
    /// The prompt, for whoever samples and has to look back at it.
    pub tokens: &'a [TokenId],
    /// One for each whole page of the prompt: names under which its pages are found, and kept when they are computed.
    pub pages: &'a [PageHash],
    /// Tokens that may be taken from pages found; the others have to be run, for what is wanted of them.
    pub reuse_max: usize,
}

impl Prefix<'_> {
    /// Nothing is looked for, and nothing is kept.
    pub const NONE: Prefix<'static> = Prefix { tokens: &[], pages: &[], reuse_max: 0 };
}

/// Names the whole pages of a prompt.
pub fn page_hashes(tenant: Tenant, prompt: &[TokenId], page_tokens: usize) -> Vec<PageHash> {
    let mut hasher = blake3::Hasher::new_derive_key("consort: the name of a page of a prompt");
    let name = |hasher: &mut blake3::Hasher, before: &[u8], page: &[TokenId]| {
        hasher.reset();
        hasher.update(before);
        for token in page {
            hasher.update(&token.0.to_le_bytes());
        }
        PageHash(*hasher.finalize().as_bytes())
    };
    let salt = name(&mut hasher, &tenant.0.to_le_bytes(), &[]);
    let pages = prompt.chunks_exact(page_tokens).scan(salt, |before, page| {
        *before = name(&mut hasher, &before.0, page);
        Some(*before)
    });
    pages.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(ids: impl IntoIterator<Item = u32>) -> Vec<TokenId> {
        ids.into_iter().map(TokenId).collect()
    }

    #[test]
    fn a_name_depends_on_every_token_before_and_on_the_tenant() {
        let prompt = tokens(0..70);
        let names = page_hashes(Tenant(1), &prompt, 32);
        assert_eq!(names.len(), 2, "only whole pages are named");
        assert_eq!(names, page_hashes(Tenant(1), &prompt[..64], 32));
        let other = page_hashes(Tenant(2), &prompt, 32);
        assert!(names.iter().all(|name| !other.contains(name)));
        for changed in [0, 31, 32, 63] {
            let mut prompt = prompt.clone();
            prompt[changed].0 += 1000;
            let found = page_hashes(Tenant(1), &prompt, 32);
            assert_eq!([found[0] == names[0], found[1] == names[1]], [changed > 31, false], "token {changed}");
        }
    }

    #[test]
    fn the_same_page_at_another_place_has_another_name() {
        let names = page_hashes(Tenant(1), &tokens((0..32).chain(0..32)), 32);
        assert_ne!(names[0], names[1]);
    }
}
