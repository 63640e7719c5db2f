//! Bytes of a capture folder's Parquet files, by column.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use lego::capture::{Query, Reader};
use parquet::file::metadata::ParquetMetaDataReader;

/// The columns of sampled ids and their log-probs.
pub const TOKENS: [&str; 2] = ["completion_token_ids", "completion_logprobs"];

/// Bytes of each column as they are on disk.
pub fn columns(dir: &Path) -> BTreeMap<String, u64> {
    let mut bytes = BTreeMap::new();
    for file in files(dir, "parquet") {
        let file = File::open(file).expect("a file");
        let metadata = ParquetMetaDataReader::new().parse_and_finish(&file).expect("Parquet");
        for column in metadata.row_groups().iter().flat_map(|group| group.columns()) {
            let name = column.column_path().parts()[0].clone();
            *bytes.entry(name).or_default() += column.compressed_size() as u64;
        }
    }
    bytes
}

/// Of ids and log-probs of what was sampled.
pub fn of_tokens(columns: &BTreeMap<String, u64>) -> u64 {
    TOKENS.iter().filter_map(|name| columns.get(*name)).sum()
}

/// The files below `dir` with this ending.
pub fn files(dir: &Path, ending: &str) -> Vec<PathBuf> {
    let mut found = vec![];
    for entry in fs::read_dir(dir).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(files(&path, ending));
        } else if path.extension().is_some_and(|extension| extension == ending) {
            found.push(path);
        }
    }
    found
}

/// Prints what the columns of `dir` take.
pub fn print(dir: &Path) {
    let query = Query { without_bodies: true, without_routing: true, as_stored: true, ..Query::default() };
    let (mut sampled, mut prompt, mut calls, mut rows) = (0, 0, 0_u64, 0);
    for call in Reader::open(dir, query).expect("captures") {
        let call = call.expect("a call");
        calls += 1;
        sampled += call.sampled_ids().map_or(0, <[u32]>::len) as u64;
        prompt += call.prompt_tokens().unwrap_or(0);
    }
    for call in Reader::open(dir, Query { without_bodies: true, as_stored: true, ..Query::default() })
        .expect("captures")
    {
        rows += call.expect("a call").routing.map_or(0, |routing| u64::from(routing.shape().rows));
    }
    let columns = columns(dir);
    let all: u64 = columns.values().sum();
    println!(
        "{calls} choices, {prompt} prompt tokens, {sampled} sampled ones, {rows} rows of routing; {all} bytes"
    );
    println!("ids and log-probs: {:.2} bytes a sampled token", of_tokens(&columns) as f64 / sampled as f64);
    if rows > 0 {
        println!("routing: {:.2} bytes a row", columns["routing"] as f64 / rows as f64);
    }
    let mut columns: Vec<_> = columns.into_iter().collect();
    columns.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    for (name, bytes) in columns.into_iter().take(12) {
        println!("{bytes:>12} {:>5.1} %  {name}", 100.0 * bytes as f64 / all as f64);
    }
}
