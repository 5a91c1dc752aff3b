from recurra.video.clips import FrameSampling, PoseFolder, evaluation_crops, normalise, read_poses, training_clip
from recurra.video.data import ClipSource, VideoConfig, VideoData, VideoViews, ViewBatch
from recurra.video.layouts import SMARTHOME_PROTOCOLS, VIDEO_LAYOUTS, Listing, Video, parse_smarthome_name
from recurra.video.motions import MotionsConfig, write_motions
from recurra.video.reader import VideoError, VideoFile, VideoFrames, VideoInfo, probe_video

__all__ = [
    "SMARTHOME_PROTOCOLS",
    "VIDEO_LAYOUTS",
    "ClipSource",
    "FrameSampling",
    "Listing",
    "MotionsConfig",
    "PoseFolder",
    "Video",
    "VideoConfig",
    "VideoData",
    "VideoError",
    "VideoFile",
    "VideoFrames",
    "VideoInfo",
    "VideoViews",
    "ViewBatch",
    "evaluation_crops",
    "normalise",
    "parse_smarthome_name",
    "probe_video",
    "read_poses",
    "training_clip",
    "write_motions",
]
