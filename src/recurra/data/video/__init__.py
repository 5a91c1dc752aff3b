"""Video: files, clips of several segments, data sets, and a generated one. PyAV is imported on first use."""

from recurra.data.video.layouts import VIDEO_LAYOUTS, Listing, Video
from recurra.data.video.motions import MotionsConfig, write_motions
from recurra.data.video.poses import PoseFolder, read_poses
from recurra.data.video.reader import VideoError, VideoFile, VideoFrames, VideoInfo, probe_video
from recurra.data.video.sampling import FrameSampling
from recurra.data.video.smarthome import SMARTHOME_PROTOCOLS, parse_smarthome_name
from recurra.data.video.sources import ClipSource, VideoViews, ViewBatch
from recurra.data.video.transforms import evaluation_crops, normalise, training_clip
from recurra.data.video.video_data import VideoConfig, VideoData

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
